"""What the board at hand tells about itself: small readers of files and commands.

Each takes `root`, the folder in which `proc` and `sys` lie, so that a tree of files can stand for a board,
and `run`, through which every external command goes. What cannot be read, is garbage or is out of any sane
range is None; no reader raises.
"""
