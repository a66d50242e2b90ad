"""Features that add to a device's round: one file or folder each, in the order of `order.py`."""
