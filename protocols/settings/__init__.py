"""The sections of run.toml, their keys and how the file is read."""
