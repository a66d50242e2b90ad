"""Checkpoints of a simulation: stored at the end of each round, and read when a stopped run goes on."""
