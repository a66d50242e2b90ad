"""Seconds, joules and bytes until a score, with proposed ratios and with every fixed ratio."""
