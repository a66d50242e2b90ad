"""Helper processes that outlive the command that started them.

A helper holds a lock on a file with its process id for as long as it lives. Other commands find and end it by
that file. A locked file always names a live helper, even after its command crashed. A helper ends by itself
when its file is removed.

This module imports only the standard library, because each link's relay is such a helper.
"""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

STOP_S = 5.0
WATCH_S = 1.0  # seconds between two checks whether the helper's file still exists
_OPEN_S = 0.02


def detach(file: Path) -> None:
    """Continue as a helper in the background.

    The calling process forks: the child continues here, the parent exits with code 0 so that its caller goes
    on.

    Raises:
        OSError: the folder of `file` is gone, because the network was removed meanwhile.
    """
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    child = os.fork()
    if child:
        os.write(lock, str(child).encode())
        os._exit(0)
    os.setsid()
    os.chdir("/")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def is_wanted(file: Path) -> bool:
    """True if the helper of `file` should go on."""
    return file.exists()


def is_running(file: Path) -> bool:
    """True if the helper of `file` is alive."""
    try:
        lock = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _lock(lock)
    finally:
        os.close(lock)


def stop(file: Path) -> None:
    """End the helper of `file`, if one is running, and remove the file.

    Raises:
        TimeoutError: the helper does not end.
    """
    try:
        lock = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        file.unlink(missing_ok=True)
        give_up_at = time.monotonic() + STOP_S
        while not _lock(lock):  # while the file is locked, its process id cannot belong to another process
            if number := os.pread(lock, 20, 0):
                os.kill(int(number), signal.SIGKILL)
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"the helper process of {file} does not end")
            time.sleep(_OPEN_S)
    finally:
        os.close(lock)


def _lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
