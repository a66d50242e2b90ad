"""A fleet on a virtual clock: the real engine, sessions and codec; only time is simulated."""
