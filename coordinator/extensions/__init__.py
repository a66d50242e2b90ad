"""The coordinator half of a run's optional features: hooks in one order, each with its own state."""
