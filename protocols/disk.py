"""The one place where something durable is changed on disk: plain operations, each of them one step.

`protocols.files` puts them together so that a power cut between any two leaves the old or the new. A test
puts a double in place of `DISK` that loses what was not synced, and stops before or after any of them.
"""

import errno
import os
import sys
from pathlib import Path
from typing import IO

_CANNOT = (errno.EINVAL, errno.EACCES)  # a file system that syncs no folders, a folder that we may not read


PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
"""Permissions of what belongs to one user: state, models, runs."""


def open_private(path: Path) -> IO[bytes]:
    """A file opened to append; a new one is its owner's alone. Raises OSError."""
    file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE), "ab")  # noqa: PTH123, SIM115
    if not os.fstat(file.fileno()).st_size:
        _hand_over(file.fileno(), path.parent)
    return file


def _hand_over(made: int | Path, folder: Path) -> None:
    """Give what root made in another user's folder to that user: `sudo edge-agent pin` may write for one."""
    if sys.platform == "win32" or os.geteuid() != 0:
        return
    owner = folder.stat()
    if owner.st_uid != 0:
        os.chown(made, owner.st_uid, owner.st_gid)


class Disk:
    """The file system as it is. Every operation raises OSError.

    Attributes:
        lasting: folders known to survive a power cut, because their own parent was synced.
    """

    def __init__(self) -> None:
        self.lasting: set[Path] = set()

    def make_folder(self, path: Path, mode: int | None = PRIVATE_FOLDER) -> None:
        """Make a folder; `mode`: its permissions, None: as the umask says."""
        if mode is None:
            path.mkdir()
            return
        path.mkdir(mode)
        _hand_over(path, path.parent)

    def write(self, path: Path, data: bytes | memoryview, mode: int | None = PRIVATE) -> None:
        """Write a new file, never readable for more users than `mode` says; None: as the umask says."""
        given = 0o666 if mode is None else mode
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, given), "wb") as file:  # noqa: PTH123
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # whatever the umask says
                _hand_over(file.fileno(), path.parent)
            file.write(data)

    def append(self, path: Path, data: bytes | memoryview) -> None:
        """Write at the end of a file; a new one is private."""
        with open_private(path) as file:
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
