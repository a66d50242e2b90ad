"""Reads what a board reports about itself: its name, sensors, memory, speed and link.

A probe is a small reader of files and commands, with one file for each thing that is read. Each takes `root`,
the folder with `proc` and `sys`, so that a tree of files can stand for a board. It takes `run`, which runs
every external command. A value that cannot be read or is out of any sane range is None. No reader raises.
`edge_agent.budget` decides what the agent does with the readings.
"""
