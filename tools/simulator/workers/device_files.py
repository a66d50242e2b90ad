"""Simulated devices' files as they were when a round ended, kept while the next one is played.

A device's files are only ever replaced whole, so that a second name keeps what they were, and takes no disk
until they are replaced. What was kept of a round goes when the next one has ended.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fleetune.protocols.errors import StoreError

_BEFORE = "before"
_PARTS = ("state", "served", "pin", "decisions", "versions")  # of a device's names, and what may change
ALL_PARTS = (
    *_PARTS,
    "begins",
    "samples.sqlite",
)  # the latter where data grow: such runs are not gone on with


def keep_before(devices: Path, name: str, closed: int) -> None:
    """Keep a device's files as they are before it works, once in a round.

    Args:
        devices: the folder of their states.
        name: of the device.
        closed: how many rounds had ended.

    Raises:
        StoreError: the disk is full.
    """
    kept = devices / _BEFORE / str(closed) / name
    if kept.exists():
        return
    new = kept.with_name(f"{name}.new")
    try:
        _make_empty(new)
        for part in _PARTS:
            _link(devices / f"{name}.{part}", new / part)
        new.rename(kept)
    except OSError as problem:
        raise StoreError(f"cannot write {new}: {problem.strerror}") from None


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        shutil.rmtree(folder)
        folder.mkdir()


def forget_before(devices: Path, closed: int) -> None:
    """The round after so many is over, and written down."""
    shutil.rmtree(devices / _BEFORE / str(closed), ignore_errors=True)


def restore(devices: Path, closed: int) -> None:
    """Put devices' files back to what they were when so many rounds had ended; twice is as good as once.

    Raises:
        StoreError: the disk is full.
    """
    try:
        for kept in _kept(devices / _BEFORE / str(closed)):
            for part in _PARTS:
                _put_back(kept / part, devices / f"{kept.name}.{part}")
        for other in _kept(devices / _BEFORE):
            if other.name != str(closed):
                shutil.rmtree(other, ignore_errors=True)
    except OSError as problem:
        raise StoreError(f"cannot restore {devices}: {problem.strerror}") from None


def _kept(folder: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from [path for path in folder.iterdir() if path.is_dir() and path.suffix != ".new"]


def _put_back(kept: Path, file: Path) -> None:
    if file.is_dir():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)
    _link(kept, file)


def _link(file: Path, to: Path) -> None:
    """A second name for a file, or for all in a folder; nothing where there is none."""
    if file.is_dir():
        to.mkdir()
        for one in file.iterdir():
            _link(one, to / one.name)
        return
    try:
        os.link(file, to)
    except FileNotFoundError:
        return
    except OSError:  # a file system without links
        shutil.copyfile(file, to)
