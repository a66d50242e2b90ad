"""A fleet behind shaped links: the simulation of a run.toml against real processes."""
