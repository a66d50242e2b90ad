"""Reads what a board reports about itself: its name, sensors, memory, speed and link.

A probe is a small reader of files and commands, with one file for each quantity. Each probe takes `root`, the
folder that contains `proc` and `sys`, so that tests can use a tree of files instead of a board. It takes
`run`, which runs every external command. A value that cannot be read or is implausible is None. No probe
raises an error. `edge_agent.budget` decides what the agent does with the readings.
"""
