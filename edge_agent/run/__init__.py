"""A device in a run: joining, its rounds from assignment to reply, and declining."""
