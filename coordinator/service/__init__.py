"""Several fleets and runs at once, from a folder of run.toml files: each run a process, looked after."""
