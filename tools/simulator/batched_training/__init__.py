"""Batched training: one process trains many devices, and a step of all of them is one step of torch."""
