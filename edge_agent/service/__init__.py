"""The agent under systemd: unit, settings, and what installs them."""
