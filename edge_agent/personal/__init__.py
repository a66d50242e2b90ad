"""The device's personal model after training: the deployed version, and its file for an app."""
