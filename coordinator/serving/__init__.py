"""The coordinator's loop over MQTT: who is heard, what waits, what each device is sent, when the run ends."""
