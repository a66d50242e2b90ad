"""Helper processes of an emulated network, which continue after the command that started them.

Each helper holds a shared lock on the network's file ALIVE while it runs, and ends when that file is
removed. So `end_helpers` needs no process ids. It removes the file, and waits until no helper holds the lock.
A helper whose death must be noticed holds a lock on a file of its own too (`hold`, `is_held`).

This module imports only the standard library, because each link's relay is a helper process.
"""

import fcntl
import os
import sys
import time
from pathlib import Path

ALIVE = "alive"
STOP_S = 10.0
WATCH_S = 0.5  # seconds between two checks whether the network still exists


def detach(alive: Path) -> int:
    """Continue in the background as a helper; return the file descriptor that `is_wanted` takes.

    The calling process forks: the child continues here. The parent exits with code 0, so that the command
    that started it can continue.

    Raises:
        OSError: `alive` no longer exists, because the network was removed meanwhile.
    """
    network = hold(alive)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())
    return network


def hold(file: Path) -> int:
    """Hold a shared lock on a file until this process and the children that it forks end.

    Returns:
        The descriptor of the open file.

    Raises:
        OSError: the file is missing.
    """
    held = os.open(file, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    return held


def is_held(file: Path) -> bool:
    """True if a process holds the lock on a file. Raises OSError: the file is missing."""
    opened = os.open(file, os.O_RDONLY)
    try:
        return not _is_free(opened)
    finally:
        os.close(opened)


def is_wanted(network: int) -> bool:
    """True if the network of this descriptor still exists."""
    return os.fstat(network).st_nlink > 0


def end_helpers(alive: Path) -> None:
    """Remove a network's file ALIVE, and wait until its helpers have ended.

    Raises:
        TimeoutError: a helper does not end.
    """
    try:
        network = os.open(alive, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        alive.unlink()
        give_up_at = time.monotonic() + STOP_S
        while not _is_free(network):
            if time.monotonic() > give_up_at:
                raise TimeoutError(
                    f"a helper process of {alive.parent} did not end within {STOP_S:.0f} s; kill it, then"
                    " take the network down again"
                )
            time.sleep(0.02)
    finally:
        os.close(network)


def _is_free(opened: int) -> bool:
    """True if no other process holds the lock on an open file. This process holds it then."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
