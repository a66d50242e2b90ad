"""Simulates on several machines: devices train in Ray actors on a cluster's nodes.

Only this package imports Ray.
"""
