"""Local training: the training loop over a device's data, and the backends that compute gradients."""
