"""Generators of the documentation: pages from the code, and pictures from real runs."""
