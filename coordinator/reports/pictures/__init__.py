"""A run's plots, and how they look."""
