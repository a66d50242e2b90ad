"""The agent as a systemd service: unit file, settings, installation, and notifications to systemd."""
