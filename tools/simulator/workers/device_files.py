"""Simulated devices' files as they were when a round ended, kept while the next one is played.

A device's files are only ever replaced whole, so that a second name keeps what they were, and takes no disk
until they are replaced; but for its samples where data grow, which are copied. What was kept of a round goes
when the next one has ended.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from fleetune.protocols.errors import StoreError

_BEFORE, _KEPT = "before", ".kept"  # the latter: a device's other files are all there
_PARTS = ("state", "served", "pin", "decisions", "versions")  # of a device's names, and what may change
_IN_PLACE = ("samples.sqlite",)  # what changes so, where data grow
_LEFT = ("-wal", "-shm", "-journal")  # by SQLite beside it, of who was killed
ALL_PARTS = (*_PARTS, *_IN_PLACE, "begins")


def keep_before(devices: Path, name: str, closed: int) -> None:
    """Keep a device's files as they are before it works, once in a round.

    Args:
        devices: the folder of their states.
        name: name of the device.
        closed: how many rounds had ended.

    Raises:
        StoreError: the disk is full.
    """
    folder = devices / _BEFORE / str(closed)
    mark = folder / f"{name}{_KEPT}"
    if mark.exists():
        return
    try:
        if not folder.exists():
            folder.mkdir(0o700, parents=True, exist_ok=True)
            (folder / _KEPT).touch()
        for part in _PARTS:
            _keep(devices / f"{name}.{part}", folder / f"{name}.{part}")
        for part in _IN_PLACE:
            _copy(devices / f"{name}.{part}", folder / f"{name}.{part}")
        try:
            os.link(folder / _KEPT, mark)  # quicker than a file of its own
        except OSError:  # a file system without links, or with too many of it
            mark.touch()
    except OSError as problem:
        raise StoreError(f"cannot write {folder}: {problem.strerror}") from None


def forget_before(devices: Path, closed: int) -> None:
    """The round after so many is over, and written down."""
    shutil.rmtree(devices / _BEFORE / str(closed), ignore_errors=True)


def restore(devices: Path, closed: int) -> None:
    """Put devices' files back to what they were when so many rounds had ended; twice is as good as once.

    Raises:
        StoreError: the disk is full.
    """
    kept = devices / _BEFORE / str(closed)
    try:
        for mark in kept.glob(f"?*{_KEPT}"):
            name = mark.name.removesuffix(_KEPT)
            for part in _PARTS:
                _put_back(kept / f"{name}.{part}", devices / f"{name}.{part}")
            for part in _IN_PLACE:
                for left in _LEFT:
                    (devices / f"{name}.{part}{left}").unlink(missing_ok=True)
                _copy(kept / f"{name}.{part}", devices / f"{name}.{part}")
        with suppress(FileNotFoundError):
            for other in kept.parent.iterdir():
                if other != kept:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError as problem:
        raise StoreError(f"cannot restore {devices}: {problem.strerror}") from None


def _keep(file: Path, kept: Path) -> None:
    """Most often a file that is to be linked, or nothing: that takes one call each."""
    try:
        os.link(file, kept)
    except FileNotFoundError:
        return
    except OSError:  # there already, of one who was killed before its mark was; or a folder
        _remove(kept)
        _link(file, kept)


def _put_back(kept: Path, file: Path) -> None:
    _remove(file)
    _link(kept, file)


def _copy(file: Path, to: Path) -> None:
    """Nothing where there is none."""
    with suppress(FileNotFoundError):
        shutil.copyfile(file, to)


def _remove(file: Path) -> None:
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def _link(file: Path, to: Path) -> None:
    """A second name for a file, or for all in a folder; nothing where there is none."""
    if file.is_dir():
        to.mkdir(0o700)
        for one in file.iterdir():
            _link(one, to / one.name)
        return
    try:
        os.link(file, to)
    except FileNotFoundError:
        return
    except OSError:  # a file system without links
        shutil.copyfile(file, to)
