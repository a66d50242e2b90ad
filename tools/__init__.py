"""edge-sim: a fleet before any device is bought; and the project's own tools."""
