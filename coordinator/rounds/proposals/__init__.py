"""Chooses task budgets in runs with an objective: each device's options, and which of them pays most."""
