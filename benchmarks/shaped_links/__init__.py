"""A fleet behind shaped links: what the simulation of a run.toml says of it, and what real processes do."""
