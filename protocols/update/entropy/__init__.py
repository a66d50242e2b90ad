"""Whole numbers and flags in as few bits as their chances allow, for encodings and masks."""
