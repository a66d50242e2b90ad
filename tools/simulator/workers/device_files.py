"""Keeps copies of simulated devices' files from the end of a round, so that a run can resume there.

A device's files are only replaced as a whole. So a hard link keeps the old content, and takes no disk space
until the file is replaced. The sample stores of growing data change in place, so they are copied. The copies
of a round are deleted when the next round has ended.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from fleetune.protocols.errors import StoreError

_BEFORE, _COPIED = "before", ".copied"  # `.copied` marks that all of a device's files have been copied
# suffixes of a device's files that are replaced as a whole
_PARTS = ("state", "deployed", "pin", "decisions", "versions")
_IN_PLACE = ("samples.sqlite",)  # suffixes of files that change in place, if data grow
# suffixes of files that SQLite leaves next to a database when its process is killed
_LEFT = ("-wal", "-shm", "-journal")
ALL_PARTS = (*_PARTS, *_IN_PLACE, "begins")


def keep_before(devices: Path, name: str, closed: int) -> None:
    """Copy a device's files before it works in a round; the first call in a round counts.

    Args:
        devices: the folder of the devices' states.
        name: name of the device.
        closed: number of ended rounds.

    Raises:
        StoreError: the disk is full.
    """
    folder = devices / _BEFORE / str(closed)
    mark = folder / f"{name}{_COPIED}"
    if mark.exists():
        return
    try:
        if not folder.exists():
            folder.mkdir(0o700, parents=True, exist_ok=True)
            (folder / _COPIED).touch()
        for part in _PARTS:
            _keep(devices / f"{name}.{part}", folder / f"{name}.{part}")
        for part in _IN_PLACE:
            _copy(devices / f"{name}.{part}", folder / f"{name}.{part}")
        try:
            os.link(folder / _COPIED, mark)  # faster than creating a file
        except OSError:  # the file system has no hard links, or the file has too many of them
            mark.touch()
    except OSError as problem:
        raise StoreError(f"cannot write {folder}: {problem.strerror}") from None


def forget_before(devices: Path, closed: int) -> None:
    """Delete the copies of a round, after the next round has been stored."""
    shutil.rmtree(devices / _BEFORE / str(closed), ignore_errors=True)


def restore(devices: Path, closed: int) -> None:
    """Restore devices' files to their state after `closed` rounds; may be repeated.

    Raises:
        StoreError: the disk is full.
    """
    copies = devices / _BEFORE / str(closed)
    try:
        for mark in copies.glob(f"?*{_COPIED}"):
            name = mark.name.removesuffix(_COPIED)
            for part in _PARTS:
                _put_back(copies / f"{name}.{part}", devices / f"{name}.{part}")
            for part in _IN_PLACE:
                for left in _LEFT:
                    (devices / f"{name}.{part}{left}").unlink(missing_ok=True)
                _copy(copies / f"{name}.{part}", devices / f"{name}.{part}")
        with suppress(FileNotFoundError):
            for other in copies.parent.iterdir():
                if other != copies:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as problem:
        raise StoreError(f"cannot restore {devices}: {problem.strerror}") from None


def _keep(file: Path, copies: Path) -> None:
    """Link a file, or all files of a folder. A single file, the usual case, takes one system call."""
    try:
        os.link(file, copies)
    except FileNotFoundError:
        return
    # it exists already, from a process that was killed before it set its mark; or it is a folder
    except OSError:
        _remove(copies)
        _link(file, copies)


def _put_back(copies: Path, file: Path) -> None:
    _remove(file)
    _link(copies, file)


def _copy(file: Path, to: Path) -> None:
    """Copy a file if it exists."""
    with suppress(FileNotFoundError):
        shutil.copyfile(file, to)


def _remove(file: Path) -> None:
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def _link(file: Path, to: Path) -> None:
    """Link a file, or all files of a folder, if it exists."""
    if file.is_dir():
        to.mkdir(0o700)
        for one in file.iterdir():
            _link(one, to / one.name)
        return
    try:
        os.link(file, to)
    except FileNotFoundError:
        return
    except OSError:  # the file system has no hard links
        shutil.copyfile(file, to)
