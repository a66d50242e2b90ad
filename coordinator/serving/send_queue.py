"""Payloads that wait to be sent, on disk instead of in memory: a large round never holds all its models."""

import mmap
import tempfile
from pathlib import Path

from fleetune.protocols.errors import StoreError

SMALL_BYTES = 65_536


def memory_mapped(payload: bytes, folder: Path) -> bytes | mmap.mmap:
    """The same bytes as pages of a nameless file, which the kernel takes back while they wait.

    Args:
        payload: small ones stay as they are.
        folder: where there is room.

    Raises:
        StoreError: the disk is full.
    """
    if len(payload) < SMALL_BYTES:
        return payload
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(payload)
            file.flush()
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as problem:
        raise StoreError(f"cannot write to {folder}: {problem.strerror}; free some space") from None
