"""The device's personal model: which version it serves, and as a file for an app."""
