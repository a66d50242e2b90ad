"""The processes in which simulated devices work, and their files there."""
