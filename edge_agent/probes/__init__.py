"""What the board at hand says about itself: which board it is, its sensors, its memory, its speed and its
link.

A probe is a small reader of files and commands, one file for each thing that is read. Each takes `root`, the
folder in which `proc` and `sys` lie, so that a tree of files can stand for a board, and `run`, through which
every external command goes. What cannot be read, is garbage or is out of any sane range is None; no reader
raises. What the agent makes of the readings is decided in `edge_agent.budget`.
"""
