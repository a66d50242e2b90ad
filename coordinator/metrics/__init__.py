"""A run in numbers: the registry of metrics, and the summary of a run."""
