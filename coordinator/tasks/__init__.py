"""Tasks that are sent to devices: made when they are sent, as differences to the model that a device
holds.
"""
