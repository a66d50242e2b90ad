"""Explains the ratios and encodings that the coordinator proposed: cost, results, and reasons."""
