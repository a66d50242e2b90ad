"""Storage for an incoming payload until it is complete."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fleetune.protocols import files
from fleetune.protocols.errors import StoreError
from fleetune.protocols.wire.messages import Offer

DIGEST_BYTES = 16


class Part(Protocol):
    """The bytes of an incoming payload received so far: its beginning, without gaps."""

    @property
    def size(self) -> int:
        """Number of bytes received; a `PartFile` keeps them over a restart."""
        ...

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes. Raises StoreError."""
        ...

    def clear(self) -> None:
        """Remove all received bytes."""
        ...

    def digest(self) -> str:
        """Return the BLAKE2b-128 digest of all received bytes, 32 hex digits. Raises StoreError."""
        ...

    def seal(self) -> None:
        """Flush to disk; after that all bytes survive a power failure. Raises StoreError."""
        ...

    def payload(self) -> bytes:
        """Return all received bytes. Raises StoreError."""
        ...


class PartMemory:
    """A part in memory: for simulations and tests."""

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def size(self) -> int:
        return len(self._data)

    def append(self, data: bytes | memoryview) -> None:
        self._data += data

    def clear(self) -> None:
        self._data.clear()

    def digest(self) -> str:
        return hashlib.blake2b(self._data, digest_size=DIGEST_BYTES).hexdigest()

    def seal(self) -> None:
        """Do nothing: memory has nothing to flush."""

    def payload(self) -> bytes:
        return bytes(self._data)


class PartFile:
    """A part in a file, so that a restarted process resumes the transfer.

    The first append creates the file. Each append opens and closes it. So a thousand devices that disconnect
    in the middle of a transfer hold no file descriptors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._size = path.stat().st_size if path.exists() else 0

    @property
    def size(self) -> int:
        return self._size

    def append(self, data: bytes | memoryview) -> None:
        files.append(self.path, data, at=self._size)
        self._size += len(data)

    def clear(self) -> None:
        files.remove(self.path, durable=False)  # if a power cut restores it, it is removed as an old part
        self._size = 0

    def digest(self) -> str:
        if not self._size:
            return hashlib.blake2b(digest_size=DIGEST_BYTES).hexdigest()
        try:
            with self.path.open("rb") as file:
                blake = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))
        except OSError as problem:
            raise _store_error(self.path, problem) from None
        return blake.hexdigest()

    def seal(self) -> None:
        if self._size:
            files.seal(self.path)

    def payload(self) -> bytes:
        if not self._size:
            return b""
        try:
            return self.path.read_bytes()
        except OSError as problem:
            raise _store_error(self.path, problem) from None


def part_folder(folder: Path, keep: int = 4) -> Callable[[Offer], PartFile]:
    """Return a function that opens the part file of an offer in `folder`. Each peer has its own folder.

    Part files of earlier processes are removed, except the `keep` last written ones, which the peer may
    resume.
    """
    left = sorted(folder.glob("*.part"), key=lambda path: path.stat().st_mtime)
    for path in left[: max(len(left) - keep, 0)]:
        files.remove(path, durable=False)
    return lambda offer: PartFile(folder / f"{offer.transfer}.part")


def _store_error(path: Path, problem: OSError) -> StoreError:
    return StoreError(f"cannot read {path}: {problem.strerror}; permit it, the transfer then goes on")
