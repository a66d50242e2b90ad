"""A simulation that was stopped, and goes on: what is kept at the end of each round, and read again."""
