"""The agent as a systemd service: its unit, and the command that installs it."""
