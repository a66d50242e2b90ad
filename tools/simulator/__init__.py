"""Simulates a fleet on a virtual clock: the real engine, sessions and codec run; only time is simulated."""
