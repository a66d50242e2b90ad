"""The only place where durable data are changed on disk: plain operations, one step each.

`protocols.files` combines them so that a power cut leaves the old or the new content. Tests replace `DISK` by
one that loses unsynced data and stops before or after any step.
"""

import errno
import os
import sys
from pathlib import Path
from typing import IO

# a file system that cannot sync folders, or a folder that we may not read
_CANNOT = (errno.EINVAL, errno.EACCES)


PRIVATE, PRIVATE_FOLDER = 0o600, 0o700
"""Permissions of files and folders of one user: state, models, runs."""


def open_private(path: Path) -> IO[bytes]:
    """Open a file for appending; a new one is readable by its owner only. Raises OSError."""
    file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, PRIVATE), "ab")  # noqa: PTH123, SIM115
    if not os.fstat(file.fileno()).st_size:
        _hand_over(file.fileno(), path.parent)
    return file


def _hand_over(made: int | Path, folder: Path) -> None:
    """Give a file that root created in another user's folder to that user (`sudo edge-agent pin`)."""
    if sys.platform == "win32" or os.geteuid() != 0:
        return
    owner = folder.stat()
    if owner.st_uid != 0:
        os.chown(made, owner.st_uid, owner.st_gid)


class Disk:
    """The real file system. Every operation raises OSError.

    Attributes:
        lasting: folders that survive a power cut, because their parent was synced.
    """

    def __init__(self) -> None:
        self.lasting: set[Path] = set()

    def make_folder(self, path: Path, mode: int | None = PRIVATE_FOLDER) -> None:
        """Create a folder with these permissions; None: those of the umask."""
        if mode is None:
            path.mkdir()
            return
        path.mkdir(mode)
        _hand_over(path, path.parent)

    def write(self, path: Path, data: bytes | memoryview, mode: int | None = PRIVATE) -> None:
        """Write a new file that is at no moment readable beyond `mode`; None for the permissions of the
        umask.
        """
        given = 0o666 if mode is None else mode
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, given), "wb") as file:  # noqa: PTH123
            if mode is not None:
                os.fchmod(file.fileno(), mode)  # regardless of the umask
                _hand_over(file.fileno(), path.parent)
            file.write(data)

    def append(self, path: Path, data: bytes | memoryview) -> None:
        """Append to a file; a new one is private."""
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
        """Return when the file's content is on the medium."""
        _sync(path, os.O_RDWR if sys.platform == "win32" else os.O_RDONLY)

    def sync_folder(self, path: Path) -> None:
        """Return when the folder's names are on the medium."""
        if sys.platform == "win32":
            return  # Windows cannot open a folder; NTFS journals names
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
