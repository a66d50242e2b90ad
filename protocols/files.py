"""Writes files so that a power cut leaves the old or the new content, never a mixture.

A rename is durable only after its folder was synced, so these functions sync folders too.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TypeVar

from fleetune.protocols import disk
from fleetune.protocols.errors import StoreError

if sys.platform != "win32":
    import fcntl

_T = TypeVar("_T")
FileMark = tuple[int, int, int]

log = logging.getLogger(__name__)


def write_atomically(
    path: Path,
    data: bytes | Iterable[bytes],
    *,
    head: bytes = b"",
    durable: bool = True,
    mode: int | None = disk.PRIVATE,
) -> None:
    """Replace the file at `path`; create its folder if needed.

    Args:
        path: the file.
        data: its new content, or the pieces of it.
        head: bytes before the content.
        durable: survive a power cut; simulations pass False.
        mode: permissions; None: those of the umask, for files that a user names as output. A folder created
            for a private file is private too.

    Raises:
        StoreError: the disk is full or the folder cannot be written.
    """
    draft = path.with_name(path.name + ".new")
    try:
        private = mode is not None and not mode & 0o077
        _make_folders(path.parent, durable=durable, private=private)
        with contextlib.suppress(
            FileNotFoundError
        ):  # left by a process that was killed, perhaps with other permissions
            disk.DISK.remove(draft)
        # written one by one, because joined they would double a large model's memory
        pieces = chain((head,) if head else (), (data,) if isinstance(data, bytes) else data)
        disk.DISK.write(draft, next(pieces, b""), mode)
        for piece in pieces:
            disk.DISK.append(draft, piece)
        if durable:
            disk.DISK.sync(draft)
        disk.DISK.rename(draft, path)
        if durable:
            disk.DISK.sync_folder(path.parent)
    except OSError as problem:
        with contextlib.suppress(OSError):
            disk.DISK.remove(draft)
        raise _store_error("write", path, problem) from None


def append(path: Path, data: bytes | memoryview, *, at: int) -> None:
    """Truncate the file to `at` bytes and append `data`; `seal` makes it durable.

    Raises:
        StoreError: the disk is full or the folder cannot be written; the file is unchanged.
    """
    try:
        _make_folders(path.parent, durable=True)
        disk.DISK.append(path, data)
    except OSError as problem:
        with contextlib.suppress(OSError):
            disk.DISK.truncate(path, at)
        raise _store_error("write", path, problem) from None


def seal(path: Path) -> None:
    """Make the file and its name survive a power cut. Raises StoreError."""

    def both() -> None:
        disk.DISK.sync(path)
        disk.DISK.sync_folder(path.parent)

    _attempt("write", path, both)


def make_folder(folder: Path, *, durable: bool = True, private: bool = True) -> None:
    """Create a folder and its missing parents; `private`: accessible to their owner only.

    Raises:
        StoreError: a folder cannot be created.
    """
    _attempt("make", folder, lambda: _make_folders(folder, durable=durable, private=private))


def keep_private(folder: Path) -> None:
    """Remove other users' access to one of Fleetune's folders."""
    with contextlib.suppress(OSError):  # a file system without permissions
        found = folder.stat()
        if sys.platform != "win32" and found.st_uid == os.geteuid() and found.st_mode & 0o077:
            folder.chmod(disk.PRIVATE_FOLDER)
            log.info("%s was open to other users; only its owner can access it now", folder)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file during this context; other processes that want it wait. Raises OSError."""
    with disk.open_private(path) as lock:
        if sys.platform != "win32":
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_private_file(path: Path) -> None:
    """Create an empty private file if there is none. Raises OSError."""
    if not path.exists():
        disk.open_private(path).close()


def remove(path: Path, *, durable: bool = True) -> None:
    """Remove a file if it exists. Raises StoreError."""

    def gone() -> None:
        with contextlib.suppress(FileNotFoundError):
            disk.DISK.remove(path)
            if durable:
                disk.DISK.sync_folder(path.parent)

    _attempt("remove", path, gone)


def remove_tree(path: Path, *, durable: bool = True) -> None:
    """Remove a file, or a folder with its content. A link is removed, its target stays.

    Raises:
        StoreError: something could not be removed.
    """
    if path.is_dir() and not path.is_symlink():
        for one in sorted(_listed(path)):
            remove_tree(one, durable=False)
        _attempt("remove", path, lambda: disk.DISK.remove_folder(path))
        disk.DISK.lasting.discard(path.absolute())
    else:
        remove(path, durable=False)
    if durable and path.parent.is_dir():
        _attempt("remove", path, lambda: disk.DISK.sync_folder(path.parent))


def remove_empty(folder: Path, *, durable: bool = True) -> None:
    """Remove a folder if it exists and is empty. Raises StoreError."""
    if folder.is_dir() and not _listed(folder):
        remove_tree(folder, durable=durable)


def _listed(folder: Path) -> list[Path]:
    return _attempt("read", folder, lambda: list(folder.iterdir()))


def _make_folders(folder: Path, *, durable: bool, private: bool = True) -> None:
    """Create the folder and its parents; sync each of them once per process.

    A killed process may have created an existing folder without syncing its name.
    """
    folder = folder.absolute()
    if folder.is_dir() and (not durable or folder in disk.DISK.lasting):
        return
    for path in reversed([folder, *folder.parents[:-1]]):
        is_new = not path.is_dir()
        if is_new:
            _make(path, disk.PRIVATE_FOLDER if private else None)
        if durable and (is_new or path not in disk.DISK.lasting):
            # folders that others created keep their permissions
            with contextlib.suppress(*([] if is_new else [OSError])):
                disk.DISK.sync_folder(path.parent)
            disk.DISK.lasting.add(path)


def mark_of(path: Path) -> FileMark | None:
    """Inode, modification time and size of a file; they change when it is replaced. None: there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _make(folder: Path, mode: int | None) -> None:
    try:
        disk.DISK.make_folder(folder, mode)
    except FileExistsError:  # another process has created it meanwhile
        if not folder.is_dir():
            raise


def _attempt(verb: str, path: Path, action: Callable[[], _T]) -> _T:
    try:
        return action()
    except OSError as problem:
        raise _store_error(verb, path, problem) from None


def _store_error(verb: str, path: Path, problem: OSError) -> StoreError:
    what = problem.filename if verb == "remove" and problem.filename else path
    advice = "" if verb == "remove" else "; free some space or choose another folder"
    return StoreError(f"cannot {verb} {what}: {problem.strerror}{advice}")
