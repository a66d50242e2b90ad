"""What is known of a run in numbers: the registry of metrics, and the summary of a run."""
