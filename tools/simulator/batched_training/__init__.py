"""Many simulated devices trained at once, by one process: each step of all of them is one step of torch."""
