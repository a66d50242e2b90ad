"""Task budgets in runs with an objective: what each participant could do, and how much of that pays."""
