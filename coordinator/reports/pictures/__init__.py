"""A run's plots and their theme."""
