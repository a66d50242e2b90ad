"""Entropy coding for encodings and masks: whole numbers and booleans in as few bits as their probabilities
allow.
"""
