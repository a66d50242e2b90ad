"""What an owner need not say: the device's name, where its state lies, how much of its data is tested on."""

import socket
from pathlib import Path

HOST = socket.gethostname().split(".")[0]
STATE = Path("agent-state")
TEST_FRACTION = 0.3
