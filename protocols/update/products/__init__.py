"""Matrices of changes as sums of few outer products: their format, and the search for those worth their
bytes.
"""
