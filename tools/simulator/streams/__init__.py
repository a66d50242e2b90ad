"""Simulated devices whose data grow: arriving samples, sample stores, and daily scores."""
