"""The one place where something durable is changed on disk: plain operations, each of them one step.

`protocols.files` puts them together so that a power cut between any two leaves the old or the new. A test
puts a double in place of `DISK` that loses what was not synced, and stops before or after any of them.
"""

import errno
import os
import sys
from pathlib import Path

_CANNOT = (errno.EINVAL, errno.EACCES)  # a file system that syncs no folders, a folder that we may not read


class Disk:
    """The file system as it is. Every operation raises OSError.

    Attributes:
        lasting: folders known to survive a power cut, because their own parent was synced.
    """

    def __init__(self) -> None:
        self.lasting: set[Path] = set()

    def make_folder(self, path: Path) -> None:
        path.mkdir()

    def write(self, path: Path, data: bytes | memoryview) -> None:
        with path.open("wb") as file:
            file.write(data)

    def write_private(self, path: Path, data: bytes | memoryview, mode: int) -> None:
        """A new file, never, not for a moment, readable for more than `mode` says."""
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:  # noqa: PTH123
            os.fchmod(file.fileno(), mode)  # whatever the umask says
            file.write(data)

    def append(self, path: Path, data: bytes | memoryview) -> None:
        with path.open("ab") as file:
            file.write(data)

    def truncate(self, path: Path, num_bytes: int) -> None:
        os.truncate(path, num_bytes)

    def rename(self, path: Path, new: Path) -> None:
        path.replace(new)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def sync(self, path: Path) -> None:
        """The file's content is on the medium when this returns."""
        _sync(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)

    def sync_folder(self, path: Path) -> None:
        """The names in the folder are on the medium when this returns."""
        if sys.platform == "win32":
            return  # a folder cannot be opened there; NTFS keeps a journal of names
        try:
            _sync(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as problem:
            if problem.errno not in _CANNOT:
                raise


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


DISK = Disk()
