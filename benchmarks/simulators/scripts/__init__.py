"""A script for each simulator, run by the Python of that simulator's own environment.

Each takes the folder of a workload (`benchmarks.simulators.workloads.lay_out`) and the number of processes,
plays federated averaging, writes the number of each round that has ended as a line, and last saves the
model's tensors as `model.npz` in the current folder. Nothing of Fleetune is imported by a rival's, but the
file beside it.
"""
