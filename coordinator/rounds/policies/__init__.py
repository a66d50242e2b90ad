"""Policies of the round engine, as functions of its state: selection, deadlines, stragglers, schedule."""
