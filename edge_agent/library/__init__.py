"""The agent as a library, for a program that reads a sensor. See docs/library.md.

`Agent` (agent.py) is the program's side: it takes samples, and gives predictions and its state. A child
process (child_main.py) connects and trains, as `edge-agent run` does. agent_process.py starts and watches it.
Both sides share the device's state folder.
"""
