"""Queries: typed values that describe the status of a run. The command line prints them."""
