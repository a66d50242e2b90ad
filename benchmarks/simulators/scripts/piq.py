"""Empty substitute for piq, which APPFL imports but does not use here.

The real one needs a torchvision built for the same torch, which pip seldom finds.
"""
