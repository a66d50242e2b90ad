"""Whole rounds of the five papers' methods by naive references, as vectors for agents in any language."""
