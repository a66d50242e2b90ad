"""Entropy coding of whole numbers and booleans, in as few bits as their probabilities allow."""
