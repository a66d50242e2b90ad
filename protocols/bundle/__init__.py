"""Models for devices without torch: graphs of standard operators, limits on their cost, and their ONNX
files.
"""
