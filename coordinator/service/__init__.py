"""Serves several fleets and runs from a folder of run.toml files, each run in a supervised process."""
