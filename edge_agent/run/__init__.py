"""A device's part in a run: joining, working on each round from assignment to reply, and declining."""
