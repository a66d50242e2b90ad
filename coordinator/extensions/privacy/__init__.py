"""Differential privacy of a run's devices: checks, accounting, clipping and central noise."""
