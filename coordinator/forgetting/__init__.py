"""Forgets a device: removes everything that a fleet and its runs store about it, and writes a receipt."""
