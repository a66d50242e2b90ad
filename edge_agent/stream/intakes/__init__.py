"""Samples as messages of programs and sensors: what they say, by a local socket and by an MQTT topic."""
