"""From a torch module to graphs that train without torch, checked against torch (extra `export`)."""
