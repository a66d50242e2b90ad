"""Bytes that a fleet sends until an accuracy, with our encodings and with published rivals."""
