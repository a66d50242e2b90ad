"""What a researcher writes in a notebook: simulate, compare, read_result, and results as data frames."""
