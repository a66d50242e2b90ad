"""The fleet's model: one flat vector and the meaning of each entry, networks by name, loss terms, cost of a
step.

Nothing here knows what is sent.
"""
