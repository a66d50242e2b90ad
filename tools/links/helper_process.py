"""A helper process that outlives the command that started it, and that is found and ended again.

It holds a lock on a file of its own for as long as it lives and its process id stands in there: a locked
file names a process that is ours, whatever became of the command that started it. A helper whose file is
gone ends itself.

Imports nothing but the standard library: a relay is one of these, and there is one for each link.
"""

import fcntl
import os
import signal
import sys
import time
from pathlib import Path

STOP_S = 5.0
WATCH_S = 1.0  # how often a helper looks whether its file is still there
_OPEN_S = 0.02


def detach(file: Path) -> None:
    """Go on as a helper; the process that was called ends with exit code 0, so that its caller may go on.

    Raises:
        OSError: the folder of `file` is gone: whoever started us has been cleaned up after already.
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
    """Whether the helper of `file` should go on."""
    return file.exists()


def is_running(file: Path) -> bool:
    """Whether the helper of `file` lives."""
    try:
        lock = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not _lock(lock)
    finally:
        os.close(lock)


def stop(file: Path) -> None:
    """End the helper of `file`, if there is one, and remove the file.

    Raises:
        TimeoutError: it does not end.
    """
    try:
        lock = os.open(file, os.O_RDWR)
    except FileNotFoundError:
        return
    try:
        file.unlink(missing_ok=True)
        give_up_at = time.monotonic() + STOP_S
        while not _lock(lock):  # while it is locked, the process id in it cannot be another's
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
