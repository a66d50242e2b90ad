"""Queries: typed values that say how a run stands. The command line prints them; nothing here prints."""
