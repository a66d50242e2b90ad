"""Devices whose data grow: what comes to them and when, their stores, and how they do from day to day."""
