"""One script for each simulator, run by the Python of that simulator's environment.

A script gets the folder of a workload (`benchmarks.simulators.workloads.lay_out`) and the number of
processes. It runs federated averaging, prints a line after each round, and saves the model's tensors as
`model.npz` in the current folder. A rival's script imports nothing of Fleetune but `workload_files`.
"""
