"""The embedded broker: an MQTT broker as a child process, with passwords and access rules for one fleet.

Which broker a run uses, one of its owner's or this one, is decided by `broker_options`. What is said over a
broker belongs to `protocols.wire`.
"""
