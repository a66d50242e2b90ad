"""Format versions of an agent's files, and the migrations from one version to the next.

Every file begins with a magic number, the version of its format (2 bytes, little endian) and 2 zero bytes. To
change the content of a kind of file, give that kind its own `Layout` with one more migration. Until the first
release, a change may raise `FIRST` instead: files of an earlier format are then refused.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

from fleetune.protocols.errors import StoreVersion

FIRST = 3
REMEDY = "install the version of fleetune that wrote it, or remove the agent's folder with edge-agent wipe"
_MAGIC = b"FLTS"
_HEAD = struct.Struct("<4sH2x")

Migration = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Layout:
    """The formats of one kind of file.

    Attributes:
        migrations: functions; the n-th turns content of format `first + n` into content of the next format.
        first: number of the oldest supported format.
    """

    migrations: tuple[Migration, ...] = ()
    first: int = FIRST

    @property
    def version(self) -> int:
        """The format in which files are written."""
        return self.first + len(self.migrations)

    @property
    def head(self) -> bytes:
        """The first bytes of a file in the written format."""
        return _HEAD.pack(_MAGIC, self.version)

    def read(self, file: IO[bytes]) -> bytes:
        """Return the content of an open file, migrated to the written format; empty if its first bytes are
        damaged.

        Raises:
            OSError: the file cannot be read.
            StoreVersion: the file has an unsupported format.
        """
        version = self._checked(file)
        if version is None:
            return b""
        content = file.read()
        for migrate in self.migrations[version - self.first :]:
            content = migrate(content)
        return content

    def skip_head(self, file: IO[bytes]) -> int | None:
        """Return the offset of the content in an open file; None if its first bytes are damaged.

        Raises:
            OSError: the file cannot be read.
            StoreVersion: the file has an unsupported format.
        """
        return None if self._checked(file) is None else _HEAD.size

    def _checked(self, file: IO[bytes]) -> int | None:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(_MAGIC):
            return None
        version: int = _HEAD.unpack(head)[1]
        if not self.first <= version <= self.version:
            raise StoreVersion.of(file.name, version, self.version, REMEDY)
        return version


PRESENT = Layout()
