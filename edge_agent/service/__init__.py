"""The agent as a service of systemd: its unit and settings, what installs them, and what the agent tells
systemd.
"""
