"""Versions of what an agent stores: an older one is read, a newer one is left alone.

Every file begins with a magic number, the version of its layout (2 bytes, little endian) and 2 zero bytes. A
file without them is of version 0: they were written so up to 0.1.0. To change what is stored, append to its
layout the function that makes the new content of the old one.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

import msgspec

from fleetune.protocols.errors import StoreVersion

_MAGIC = b"FLTS"
_HEAD = struct.Struct("<4sH2x")

Migration = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Layout:
    """The layouts that one kind of file has had.

    Attributes:
        migrations: the n-th turns content of version n into content of version n + 1.
    """

    migrations: tuple[Migration, ...]

    @property
    def version(self) -> int:
        """The version that is written."""
        return len(self.migrations)

    @property
    def head(self) -> bytes:
        """What a file of this version begins with."""
        return _HEAD.pack(_MAGIC, self.version)

    def read(self, file: IO[bytes]) -> bytes:
        """Read an open file, and return its content as the present version has it.

        Raises:
            OSError: it cannot be read; StoreVersion: a newer program wrote it.
        """
        version = self._checked(file)
        if version == 0:
            file.seek(0)
        content = file.read()
        for migrate in self.migrations[version:]:
            content = migrate(content)
        return content

    def skip_head(self, file: IO[bytes]) -> int:
        """Where the content of an open file begins, of the version that is written.

        Raises:
            OSError: it cannot be read; StoreVersion: a newer program wrote it.
        """
        return _HEAD.size if self._checked(file) else 0

    def _checked(self, file: IO[bytes]) -> int:
        version = _version(file.read(_HEAD.size))
        if version > self.version:
            raise StoreVersion.of(file.name, version, self.version)
        return version


def _version(head: bytes) -> int:
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        return 0
    version: int = _HEAD.unpack(head)[1]
    return version


def _as_it_is(content: bytes) -> bytes:
    """Content of version 1 is that of version 0; its head alone is new."""
    return content


def _fits_said_apart(content: bytes) -> bytes:
    """Bring a ratio controller to version 1: in version 0 it said by ratio 0, which no report may hold, that
    nothing fits.
    """
    try:
        ratio_controller = msgspec.msgpack.decode(content)
        if ratio_controller["report"]["ratio"] == 0:
            ratio_controller["report"]["ratio"] = ratio_controller["choices"][-1]["ratio"]
            ratio_controller["fits"] = False
    except (msgspec.DecodeError, TypeError, LookupError):
        return content  # damaged; whoever reads it says so
    return msgspec.msgpack.encode(ratio_controller)


FIRST = Layout((_as_it_is,))
ENROLMENT = SESSION = TASK = BUNDLE = BACKBONE = SERVED = FIRST
RATIO_CONTROLLER = Layout((_fits_said_apart,))
