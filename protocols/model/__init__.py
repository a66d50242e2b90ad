"""The fleet's model: one flat vector, networks by name, loss terms, and the cost of a training step.

No module here knows what is sent.
"""
