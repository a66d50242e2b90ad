"""Lock of a run's folder: one writer at a time. The kernel holds the lock file and frees it when its process
ends.

Reading a run needs no lock. On a network file system neither the lock nor SQLite's shared memory is reliable,
so runs belong on a local disk.
"""

import os
import sys
import time
from pathlib import Path
from typing import IO

from fleetune.protocols import disk
from fleetune.protocols.errors import StoreError

if sys.platform != "win32":
    import fcntl

LOCK = "lock"
_TAKEN = "another coordinator runs {}: stop it, or give this run another run.name"
_ATTEMPTS, _PAUSE_S = 5, 0.05  # `is_claimed` holds the lock for a moment, so try again


def claim(folder: Path) -> IO[bytes]:
    """Lock an existing folder until the returned file is closed or this process ends.

    Raises:
        StoreError: another process holds it, or it cannot be written.
    """
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S)
        lock = _opened(folder)
        if _lock(lock, shared=False) and _is_there(lock, folder):
            return lock
        lock.close()
    raise StoreError(_TAKEN.format(folder))


def _opened(folder: Path) -> IO[bytes]:
    try:
        return disk.open_private(folder / LOCK)
    except OSError as problem:
        raise StoreError(f"cannot use {folder}: {problem.strerror}") from None


def _is_there(lock: IO[bytes], folder: Path) -> bool:
    """True if this lock file still exists: its last holder may have removed it (`run_folder.clear`)."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), (folder / LOCK).stat())
    except FileNotFoundError:
        return False


def check_unclaimed(folder: Path) -> None:
    """Check that no other process holds the folder now.

    Raises:
        StoreError: another process holds it (the message of `claim`).
    """
    if is_claimed(folder):
        raise StoreError(_TAKEN.format(folder))


def is_claimed(folder: Path) -> bool:
    """True if a process holds the folder now."""
    try:
        with (folder / LOCK).open("rb") as lock:
            return not _lock(lock, shared=True)
    except OSError:  # no process ever held it
        return False


def _lock(lock: IO[bytes], *, shared: bool) -> bool:
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as problem:
        raise StoreError(f"cannot lock {lock.name}: {problem.strerror}; is it on a local disk?") from None
    return True
