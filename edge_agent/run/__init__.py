"""A device's part in a run: joining, working on each round from task to reply, and declining."""
