"""Stands in for piq, which APPFL imports to judge images in reports on data, which nobody asks for here: it
needs a torchvision made for this very torch, which pip finds for few.
"""
