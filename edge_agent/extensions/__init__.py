"""Features that add to a device's round. Each is one file or folder; `order.py` gives their order."""
