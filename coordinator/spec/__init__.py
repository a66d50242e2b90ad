"""Describes a torch module as a `ModelSpec`: its layers, its neurons, and which of them are coupled."""
