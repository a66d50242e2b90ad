"""Plays systemd for programs that notify it."""

import select
import socket
import time

from tests.helpers.fleet_processes import PATIENCE_S


class Manager:
    """Plays systemd: the socket that NOTIFY_SOCKET names."""

    def __init__(self, address):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address.replace("@", "\0", 1))
        self.heard = []

    def next(self, patience_s=PATIENCE_S):
        """The next message; None: none came."""
        if not select.select([self._socket], [], [], patience_s)[0]:
            return None
        self.heard.append(self._socket.recv(4096).decode())
        return self.heard[-1]

    def wait_for(self, start):
        give_up_at = time.monotonic() + PATIENCE_S
        while time.monotonic() < give_up_at:
            message = self.next()
            if message is not None and message.startswith(start):
                return message
        raise AssertionError(f"{start} never came; heard {self.heard}")

    def drain(self):
        """Forget what has come so far."""
        while self.next(0) is not None:
            pass

    def close(self):
        self._socket.close()
