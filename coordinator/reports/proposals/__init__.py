"""Explains the coordinator's proposals: cost and results of ratios and encodings, and the reasons for
them.
"""
