"""The coordinator half of features that a run may have: hooks in one order, each with its own state."""
