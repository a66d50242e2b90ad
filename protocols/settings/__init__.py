"""run.toml: its sections and their meaning, and how it is read."""
