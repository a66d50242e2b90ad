"""Worker processes of the simulator, and the devices' files."""
