"""Matrices of changes as sums of few outer products: what these are, and which are worth their bytes."""
