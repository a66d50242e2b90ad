"""Serves a run over MQTT: the event loop, device sessions, admission, transfers and the end of the run."""
