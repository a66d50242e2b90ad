"""Notifies the service manager that started this program: ready, alive, stopping (sd_notify(3)).

It sends datagrams to the socket in NOTIFY_SOCKET. Without that variable it sends nothing.
"""

import contextlib
import functools
import math
import os
import socket
from collections.abc import Mapping

ENVIRONMENT = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
_SEND_S = 1.0
_LONGEST = 1000  # characters of a status, which is one line of `systemctl status`


class Notifier:
    """The connection to the service manager, if there is one.

    Args:
        environment: NOTIFY_SOCKET is its address; WATCHDOG_USEC is how long it waits for a keepalive of
            process WATCHDOG_PID.

    Attributes:
        wake_at: when `beat` is due, by the caller's clock; None: never.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get("NOTIFY_SOCKET", "")
        self._address = path.replace("@", "\0", 1) if path.startswith("@") else path
        limit_s = _watchdog_s(environment) if self._address else None
        self._every_s = None if limit_s is None else limit_s / 2
        self._is_ready = False
        self.wake_at: float | None = None if self._every_s is None else -math.inf

    @property
    def listens(self) -> bool:
        """True if there is a service manager."""
        return bool(self._address)

    def ready(self) -> None:
        """Report, once, that the service works."""
        if not self._is_ready:
            self._is_ready = True
            self._send("READY=1")

    def beat(self, now: float) -> None:
        """Send a keepalive if one is due: twice per watchdog period."""
        if self._every_s is not None and self.wake_at is not None and now >= self.wake_at:
            self.wake_at = now + self._every_s
            self._send("WATCHDOG=1")

    def status(self, text: str) -> None:
        """Report in one line, for people, what the service is doing."""
        self._send(f"STATUS={text.partition(chr(10))[0][:_LONGEST]}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        """Send a message. A message that the manager does not accept is lost; the program continues."""
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.settimeout(_SEND_S)
            line.connect(self._address)
            line.send(message.encode(errors="replace"))


@functools.cache
def service_manager() -> Notifier:
    """Return the notifier for this process's service manager.

    The variables for it are removed from the environment, so that child processes send no notifications.
    """
    found = Notifier(os.environ)
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    return found


def _watchdog_s(environment: Mapping[str, str]) -> float | None:
    """Return the watchdog's period in seconds; None if there is none, or if it watches another process."""
    microseconds, whose = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not microseconds.isdecimal() or int(microseconds) == 0 or whose not in ("", str(os.getpid())):
        return None
    return int(microseconds) / 1e6
