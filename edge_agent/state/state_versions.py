"""Versions of what an agent stores: an older one is read, a newer one is left alone.

Every file begins with a magic, the version of its layout (2 bytes, little endian) and 2 zero bytes. A file
without them is of version 0: so they were written up to 0.1.0. To change what is stored, append to its
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
    """Of one kind of file.

    Attributes:
        migrations: the n-th turns content of version n into content of version n + 1.
    """

    migrations: tuple[Migration, ...]

    @property
    def version(self) -> int:
        """That is written."""
        return len(self.migrations)

    @property
    def head(self) -> bytes:
        """What a file of it begins with."""
        return _HEAD.pack(_MAGIC, self.version)

    def read(self, file: IO[bytes]) -> bytes:
        """The content of an open file, as this version has it.

        Raises:
            OSError, StoreVersion: a newer program wrote it.
        """
        version = _version(file.read(_HEAD.size))
        if version > self.version:
            raise StoreVersion.of(file.name, version, self.version)
        if version == 0:
            file.seek(0)
        content = file.read()
        for migrate in self.migrations[version:]:
            content = migrate(content)
        return content


def _version(head: bytes) -> int:
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        return 0
    version: int = _HEAD.unpack(head)[1]
    return version


def _as_it_is(content: bytes) -> bytes:
    """Version 1 differs from 0 in its head alone."""
    return content


def _fits_said_apart(content: bytes) -> bytes:
    """A ratio controller of version 0 said by ratio 0 that nothing fits, which a report may not hold."""
    try:
        ratio_controller = msgspec.msgpack.decode(content)
        if ratio_controller["report"]["ratio"] == 0:
            ratio_controller["report"]["ratio"] = ratio_controller["choices"][-1]["ratio"]
            ratio_controller["fits"] = False
    except (msgspec.DecodeError, TypeError, LookupError):
        return content  # damaged; whoever reads it says so
    return msgspec.msgpack.encode(ratio_controller)


FIRST = Layout((_as_it_is,))
ENROLMENT = SESSION = TASK = BUNDLE = SERVED = FIRST
RATIO_CONTROLLER = Layout((_fits_said_apart,))
