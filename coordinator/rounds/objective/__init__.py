"""What a run remembers for its objective: what ratios have shown, and what was taken so far."""
