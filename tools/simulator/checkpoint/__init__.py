"""Checkpoints of a simulation: stored at the end of each round, and read to resume an interrupted run."""
