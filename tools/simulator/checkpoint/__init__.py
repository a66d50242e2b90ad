"""Checkpoints of a simulation: stored at the end of each round; an interrupted run resumes from them."""
