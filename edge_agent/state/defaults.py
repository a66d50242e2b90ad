"""Defaults of an owner's options: the device's name, the state folder, and the fraction of test samples."""

import socket
from pathlib import Path

HOST = socket.gethostname().split(".")[0]
STATE = Path("agent-state")
TEST_FRACTION = 0.3
