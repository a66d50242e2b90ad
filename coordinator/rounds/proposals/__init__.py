"""What a run with an objective proposes to each participant: what it could do, and how much of that pays."""
