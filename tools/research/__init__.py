"""Functions for notebooks: simulate, compare, sweep and read_result, with results as data frames."""
