"""Large arrays and payloads as pages of an unnamed file, for content that is read from time to time.

The system drops such pages when memory is short. `release` drops them at once; they are read again on use.
"""

import mmap
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import StoreError

SMALL_BYTES = 65_536  # smaller content stays in memory: a file would cost more than it saves


def bytes_on_disk(content: bytes | memoryview, folder: Path) -> bytes | memoryview | mmap.mmap:
    """Return the same bytes as pages of an unnamed file; unchanged if they are small.

    Args:
        content: the bytes.
        folder: a folder on a disk with enough space.

    Raises:
        StoreError: the disk is full.
    """
    if len(content) < SMALL_BYTES:
        return content
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(content)
            file.flush()
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as problem:
        raise StoreError(f"cannot write to {folder}: {problem.strerror}; free some space") from None


def array_on_disk(array: NDArray[Any], folder: Path) -> NDArray[Any]:
    """Return the same array, read-only, as pages of an unnamed file; see `bytes_on_disk`."""
    if array.nbytes < SMALL_BYTES:
        return array
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return np.frombuffer(bytes_on_disk(content, folder), array.dtype).reshape(array.shape)


def release(content: object) -> None:
    """Drop the pages of an array or payload that is on disk; do nothing to others."""
    while isinstance(content, np.ndarray | memoryview):
        content = content.base if isinstance(content, np.ndarray) else content.obj
    if isinstance(content, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        content.madvise(mmap.MADV_DONTNEED)
