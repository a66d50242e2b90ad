"""A model for devices without torch: graphs of standard operators, what they may cost, and their ONNX
files.
"""
