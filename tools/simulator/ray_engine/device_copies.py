"""Copies simulated devices' files between the run's folder and the nodes' disks: all, or the changed ones."""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import StoreError
from fleetune.tools.simulator.workers.device_files import ALL_PARTS

Content = NDArray[np.uint8]  # content of a file; Ray moves arrays without copying them
Stamp = tuple[int, int, int]  # stamp of a file; it differs after a change
_NEW = ".coming"


@dataclass(frozen=True)
class Changes:
    """Changes of a device's files by a task.

    Attributes:
        written: new and changed files, by their path below the folder of devices.
        removed: paths of removed files.
    """

    written: Mapping[str, Content | bytes] = field(default_factory=dict)
    removed: tuple[str, ...] = ()


def all_of(devices: Path, name: str) -> dict[str, Content]:
    """Return a device's files, by their path below the folder of devices.

    Raises:
        StoreError: a file cannot be read.
    """
    try:
        return {str(path.relative_to(devices)): np.fromfile(path, np.uint8) for path in _files(devices, name)}
    except OSError as problem:
        raise StoreError(f"cannot read the files of {name} in {devices}: {problem.strerror}") from None


def stamps(devices: Path, name: str) -> dict[str, Stamp]:
    """Return a stamp of each of a device's files, from which `changes` finds the changed files."""
    return {str(path.relative_to(devices)): _stamp(path) for path in _files(devices, name)}


def changes(devices: Path, name: str, before: Mapping[str, Stamp]) -> Changes:
    """Return the changes to a device's files since `stamps`."""
    now = stamps(devices, name)
    other = [path for path, one in now.items() if before.get(path) != one]
    written = {path: np.fromfile(devices / path, np.uint8) for path in other}
    return Changes(written, tuple(path for path in before if path not in now))


def apply(devices: Path, found: Changes) -> None:
    """Apply the changes to the files on this machine.

    Each file is replaced as a whole, so a hard link to the old file keeps the old content.

    Raises:
        StoreError: the disk is full.
    """
    try:
        for path, data in found.written.items():
            file = devices / path
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_name(file.name + _NEW)
            new.write_bytes(data if isinstance(data, bytes) else data.data)
            new.replace(file)
        for path in found.removed:
            (devices / path).unlink(missing_ok=True)
    except OSError as problem:
        raise StoreError(f"cannot write device files in {devices}: {problem.strerror}") from None


def replace_all(devices: Path, name: str, files: Mapping[str, Content]) -> None:
    """Replace a device's files by exactly these. Raises StoreError if the disk is full."""
    forget(devices, name)
    apply(devices, Changes(files))


def forget(devices: Path, name: str) -> None:
    """Remove all files of a device."""
    for part in ALL_PARTS:
        path = devices / f"{name}.{part}"
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _files(devices: Path, name: str) -> Iterator[Path]:
    """Yield a device's files by their known names; searching a folder of 100,000 devices would take long."""
    for part in ALL_PARTS:
        path = devices / f"{name}.{part}"
        if path.is_dir():
            yield from sorted(one for one in path.rglob("*") if one.is_file())
        elif path.exists():
            yield path


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
