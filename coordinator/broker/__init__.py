"""The embedded broker: an MQTT broker as a child process, with passwords and access rules for one fleet.

`broker_options` decides between it and the user's own broker. `protocols.wire` defines the messages.
"""
