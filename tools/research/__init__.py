"""Functions for notebooks: simulate, compare, sweep and read_result; results are data frames."""
