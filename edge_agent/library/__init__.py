"""Fleetune's agent as a library: a few lines in a program that reads a sensor, see docs/library.md.

`Agent` (agent.py) is the program's side: samples in, predictions out, what stands. Connecting and training is
`edge-agent run` in a child process (child_main.py, started and watched by agent_process.py). Both sides share
the device's state folder.
"""
