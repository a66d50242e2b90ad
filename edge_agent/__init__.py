"""The program on a device: it joins runs, trains on the device's own samples, and sends what its board can
give.
"""
