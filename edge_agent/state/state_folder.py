"""The folder of one agent's state: ownership, locking, and removing the agent's files.

A marker file records that an agent made the folder, and in which format. A running agent holds a lock.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from fleetune.edge_agent.joining.joined_fleet import joined_fleet
from fleetune.edge_agent.state.defaults import HOST
from fleetune.edge_agent.state.state_versions import FIRST, PRESENT, REMEDY
from fleetune.protocols import disk
from fleetune.protocols.errors import SettingError, StoreError, StoreInUse, StoreVersion
from fleetune.protocols.files import keep_private, make_folder, remove, remove_empty, write_atomically
from fleetune.protocols.wire.identity import check_display_name
from fleetune.protocols.wire.topics import check_name, valid_name

if sys.platform != "win32":
    import fcntl

MARKER, LOCK = "fleetune-agent", "lock"
VERSION = FIRST
_DEPTH = 2  # folder levels below --state: the fleet's folder, the device's folder

# `served` is the `deployed` of formats before 3, which a wipe removes too
_RUN = "enrolment|bundle|backbone|session|allowance|task-[0-9a-f]{32}"
_OURS = re.compile(
    rf"({MARKER}|{LOCK}|deployed|served|pin|decisions|publish|versions/[0-9]{{1,9}}|samples\.sqlite(?:-wal|-shm)?"
    rf"|(?:bundles|backbones)/[0-9a-f]{{32}}|incoming/[0-9a-f]{{32}}\.part|runs/([\w-]{{1,96}})/({_RUN}))"
    r"(\.new)?"
)
_FOLDERS = ("incoming", "bundles", "backbones", "versions", "runs/*", "runs")


class _Marker(msgspec.Struct, omit_defaults=True):
    version: int
    name: str = ""  # the device's name for people, if it is not its id


@dataclass(frozen=True)
class AgentFiles:
    """The files of an agent in one folder.

    Attributes:
        folder: folder of the device.
        files: all files that an agent has written in the folder.
        runs: ids of the runs in which the agent took part.
        num_bytes: total size of the files.
        foreign: files that do not belong to the agent.
    """

    folder: Path
    files: tuple[Path, ...]
    runs: tuple[str, ...]
    num_bytes: int
    foreign: tuple[Path, ...]


def device_folder(state: Path, fleet: str | None, device: str | None = None, name: str | None = None) -> Path:
    """Return the folder of a device's state. The folder's name is the device's id.

    In a fleet that the device has joined, the id is the one that it got then. Otherwise the first start fixes
    the id: `device`, else `name`, else the machine's name. Later starts without `device` find the id in the
    state. If the state has one device, its id is used, even if the machine or the device was renamed. If the
    state has several devices, the one whose id or stored name is `name` is used; without `name`, the one
    whose id is the machine's name.

    Args:
        state: folder given by `--state`.
        fleet: name of the fleet; None for the only one that the device has joined.
        device: the device's id; None if not given.
        name: the device's name for people; None if not given.

    Raises:
        SettingError: no fleet is given, and the device has joined none or several; several devices of the
            fleet have their state here, and the rule above selects none or more than one; or an id is invalid
            in a topic, or the name has unprintable characters.
        StoreError: the stored name of one of several devices cannot be read.
    """
    if name is not None:
        check_display_name(name)
    joined = joined_fleet(state, fleet)
    if fleet is None and joined is None:
        raise SettingError(f"--fleet is not given, and this device has joined no fleet below {state}")
    fleet = fleet if joined is None else joined.fleet
    below = state / check_name(str(fleet), "fleet")
    if device is not None:
        return below / check_name(device, "device")
    if joined is not None:
        return below / joined.device
    found = sorted(path.parent for path in below.glob(f"*/{MARKER}"))
    if not found:
        return below / (check_name(HOST, "device") if name is None else _id_from(name))
    chosen = found if len(found) == 1 else [path for path in found if _is_called(path, name)]
    if len(chosen) != 1:
        known = ", ".join(path.name for path in found)
        raise SettingError(f"{below} holds the state of several devices: {known}; choose one with --device")
    return chosen[0]


def only_device(state: Path, fleet: str) -> str | None:
    """Return the device whose state is stored for a fleet; None if there is none, or more than one."""
    found = [path.parent.name for path in (state / fleet).glob(f"*/{MARKER}")]
    return found[0] if len(found) == 1 else None


def _is_called(folder: Path, name: str | None) -> bool:
    """True if the device's id or stored name is `name`; without `name`, if its id is the machine's name."""
    return folder.name == HOST if name is None else name in (folder.name, label(folder))


def _id_from(name: str) -> str:
    """Return the id of a device whose first start has only its name. Raises SettingError if it is invalid."""
    try:
        return check_name(name, "--name")
    except SettingError:
        valid, shown = valid_name(name) or "device-1", name if name.isalnum() else shlex.quote(name)
        raise SettingError(
            f"--name {name!r} cannot be the device's id, which the first start takes from it;"
            f" give an id too: --device {valid} --name {shown}"
        ) from None


def label(folder: Path, name: str | None = None) -> str:
    """Return the device's name for people: `name`, which is then stored; for None, the stored name.

    Raises:
        StoreError: the marker cannot be read, or is damaged.
    """
    marker = _read_marker(folder)
    stored = (marker.name if marker is not None else "") or folder.name
    if name is None or name == stored:
        return stored
    with suppress(StoreError):  # the disk is full: the name applies until the agent ends
        shown = "" if name == folder.name else name
        write_atomically(folder / MARKER, msgspec.json.encode(_Marker(VERSION, shown)))
    return name


def claim(folder: Path) -> IO[bytes]:
    """Make the folder, or take over an existing one, and lock it.

    The lock is held until the returned file is closed or this process ends.

    Raises:
        StoreVersion: the folder has an unsupported format.
        StoreError: another agent holds the lock, or the folder cannot be written.
    """
    make_folder(folder)
    with ExitStack() as stack:
        held = stack.enter_context(lock(folder))
        mark(folder)
        stack.pop_all()
    return held


def mark(folder: Path) -> None:
    """Mark a folder as an agent's, so that a wipe finds the agent's files. Make the folder if it is missing.

    Raises:
        StoreVersion: the folder has an unsupported format.
        StoreError: the folder cannot be made, or its marker is damaged.
    """
    check_format(folder)
    make_folder(folder)
    keep_private(folder)
    if _marked_version(folder) is None:
        with suppress(StoreError):  # the disk is full: the next start writes the marker
            write_atomically(folder / MARKER, msgspec.json.encode(_Marker(VERSION)))


def lock(folder: Path) -> IO[bytes]:
    """Lock an existing folder, without writing anything else.

    Raises:
        StoreError: another agent holds the lock, or the folder cannot be written.
    """
    while True:
        held = _locked(folder)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(held.fileno()), (folder / LOCK).stat()):
                return held
        held.close()  # this lock file belongs to a folder that was wiped meanwhile


def _locked(folder: Path) -> IO[bytes]:
    try:
        held = disk.open_private(folder / LOCK)
    except OSError as problem:
        raise StoreError(f"cannot use {folder}: {problem.strerror}") from None
    try:
        if sys.platform != "win32":
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        held.close()
        raise StoreInUse(
            f"another agent uses {folder}: stop it, or give this one another --device or --state"
        ) from None
    return held


def check_format(folder: Path) -> None:
    """Check that the folder has this program's format, or does not exist yet.

    Raises:
        StoreVersion: it has another format.
        StoreError: its marker cannot be read, or is damaged.
    """
    version = _marked_version(folder)
    if version is None and any(_has_no_head(path) for path in folder.glob("runs/*/enrolment")):
        version = 0  # early agents wrote neither markers nor versions
    if version not in (None, VERSION):
        raise StoreVersion.of(f"state folder {folder}", version, VERSION, REMEDY)


def _has_no_head(path: Path) -> bool:
    with path.open("rb") as file:
        return PRESENT.skip_head(file) is None


def _marked_version(folder: Path) -> int | None:
    """Return the format of an agent's folder; None if no agent has marked it.

    Raises:
        StoreError: the marker cannot be read, or is damaged.
    """
    marker = _read_marker(folder)
    return None if marker is None else marker.version


def _read_marker(folder: Path) -> _Marker | None:
    path = folder / MARKER
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Marker)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as problem:
        raise StoreError(f"cannot read {path}: {problem.strerror}") from None
    except msgspec.DecodeError:
        raise StoreError(f"{path} is damaged; remove it, and the agent makes it anew") from None


def agent_files(state: Path) -> list[AgentFiles]:
    """Find the files of agents, of any format, in a folder given by `--state`; one entry for each device.

    Raises:
        StoreError: a marker cannot be read, or is damaged.
    """
    return [
        _agent_files(folder)
        for depth in range(_DEPTH + 1)
        for folder in sorted(_below(state, depth))
        if os.access(folder, os.R_OK | os.X_OK) and _marked_version(folder) is not None
    ]


def wipe(state: Path, found: list[AgentFiles]) -> None:
    """Remove the agents' files and the folders that become empty, once no agent uses them.

    Args:
        state: the folder, as in `agent_files`.
        found: the result of `agent_files`.

    Raises:
        StoreError: an agent runs, and nothing was removed; or some file could not be removed.
    """
    with ExitStack() as stack:
        for one in found:
            stack.enter_context(lock(one.folder))
        for one in found:
            _remove(_agent_files(one.folder))
    for one in found:
        for folder in (one.folder, *one.folder.parents):
            if folder.is_relative_to(state):
                remove_empty(folder)


def _remove(one: AgentFiles) -> None:
    """Remove the files; marker and lock go last, so that an interrupted wipe can be repeated."""
    for path in sorted(one.files, key=lambda path: path.name in (MARKER, LOCK)):
        remove(path)
    for pattern in _FOLDERS:
        for folder in one.folder.glob(pattern):
            if not folder.is_symlink():
                remove_empty(folder)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if not depth:
        return iter((folder,))
    return (path for path in folder.glob("/".join("*" * depth)) if not path.is_symlink())


def _agent_files(folder: Path) -> AgentFiles:
    ours, foreign, runs = [], [], set()
    for path in _files(folder):
        name = _OURS.fullmatch(path.relative_to(folder).as_posix())
        if name is None or path.is_symlink():
            foreign.append(path)
            continue
        ours.append(path)
        runs |= {name[2]} - {None}  # files outside `runs/` have no run
    num_bytes = sum(path.stat().st_size for path in ours)
    return AgentFiles(folder, tuple(ours), tuple(sorted(runs)), num_bytes, tuple(foreign))


def _files(folder: Path) -> Iterator[Path]:
    """Yield all files below the folder; links are listed, not followed."""
    for where, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(where) / name).is_symlink()]
        yield from (Path(where) / name for name in sorted([*files, *links]))
