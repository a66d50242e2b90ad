"""Entropy coding for encodings and masks: whole numbers and flags in as few bits as their probabilities
allow.
"""
