"""The device's personal model after training: which version of it the device serves, and that version as a
file for an app.
"""
