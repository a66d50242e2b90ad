"""One run: opened in its folder, led through its rounds by the run controller, every reply checked."""
