"""Programs as systemd services: unit files, settings, installation, notifications, and log lines."""
