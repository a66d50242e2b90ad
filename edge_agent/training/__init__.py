"""Local training: one loop over the device's data, and the backends that compute gradients."""
