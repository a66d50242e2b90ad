"""What each board can do and how it is recognised: one TOML file for each board, each figure with its source.

`load("raspberry-pi-4b")` gives a `Board`, `names()` all there are, `recognised` the one that a machine is;
`load_file` reads a file of the user's own and `save` writes one. A new board is a new file; see
docs/boards.md. What a board really does is measured in `edge_agent.probes`.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from fleetune.firmware_profiles.recognition import Machine, Recognition, closest
from fleetune.firmware_profiles.schema import (
    ESTIMATE,
    MEASURED,
    Figure,
    Figures,
    Profile,
    ProfileError,
    decode,
    decode_recognition,
    encode,
    stated,
)

__all__ = [
    "ESTIMATE",
    "MEASURED",
    "UNKNOWN",
    "Board",
    "Figure",
    "Figures",
    "Machine",
    "Profile",
    "ProfileError",
    "Recognition",
    "load",
    "load_file",
    "names",
    "recognised",
    "recognitions",
    "save",
    "stated",
]

UNKNOWN = "generic"  # the board of which agents claim nothing
_FILES = resources.files(__name__)


@dataclass(frozen=True)
class Board:
    """One board: the figures of `Figures`, in bytes and bits.

    Attributes:
        name: as its file is called, and as run.toml says it.
        title: as its maker calls it.
        battery_wh: None: it has no battery.
        profile: what its file says, each figure with its source.
    """

    name: str
    title: str
    cores: int
    memory_bytes: int
    training_gflops: float
    uplink_bps: float
    downlink_bps: float
    idle_w: float
    train_w: float
    transmit_w: float
    receive_w: float
    battery_wh: float | None
    max_celsius: float
    sensors: tuple[str, ...]
    links: tuple[str, ...]
    profile: Profile = field(repr=False)


def names() -> tuple[str, ...]:
    """The names of all boards with a profile, in alphabetical order."""
    files = (entry.name for entry in _FILES.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


@cache
def load(name: str) -> Board:
    """Read the profile of a board that comes with Fleetune, once.

    Raises:
        KeyError: there is none of that name; its argument is a line that names those that are.
    """
    if name not in names():
        raise KeyError(f"no board {name!r}; known: {', '.join(names())}")
    return _board(name, decode(*_shipped(name)))


def recognised(machine: Machine) -> str:
    """The board whose file describes this machine most closely; `UNKNOWN` when none does."""
    return closest(recognitions(), machine) or UNKNOWN


def recognitions() -> dict[str, Recognition]:
    """The table `[recognise]` of each board whose file has one, by the board's name."""
    found = {name: decode_recognition(*_shipped(name)) for name in names()}
    return {name: one for name, one in found.items() if one is not None}


def load_file(path: Path, text: str | None = None) -> Board:
    """Read the profile in a file of the user's own; the board is called as the file.

    Args:
        path: of the file.
        text: its content, where the caller has read it already.

    Raises:
        ProfileError: the file cannot be read, or what it says is wrong.
    """
    if path.stem == UNKNOWN:
        raise ProfileError(f"{path}: of a board called {UNKNOWN!r} nothing is claimed; rename the file")
    try:
        text = path.read_text(encoding="utf-8") if text is None else text
    except OSError as problem:
        raise ProfileError(f"board {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ProfileError(f"board {path} is no text in UTF-8; see docs/boards.md") from None
    return _board(path.stem, decode(text, str(path)))


def save(path: Path, profile: Profile) -> None:
    """Write a file that `load_file` takes: the whole of it or nothing.

    Raises:
        ProfileError: a figure is out of its range, or the file cannot be written.
    """
    text = encode(profile)
    decode(text, str(path))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as problem:
        with suppress(OSError):
            draft.unlink()
        raise ProfileError(f"board {path} cannot be written: {problem.strerror}") from None


def _shipped(name: str) -> tuple[str, str]:
    """The text of a board's file, and the file's name."""
    entry = _FILES / f"{name}.toml"
    return entry.read_text(encoding="utf-8"), entry.name


def _board(name: str, profile: Profile) -> Board:
    figures = profile.figures
    return Board(
        name=name,
        title=profile.title,
        cores=figures.cores.value,
        memory_bytes=figures.memory_mib.value * 1_048_576,
        training_gflops=figures.training_gflops.value,
        uplink_bps=figures.uplink_mbps.value * 1e6,
        downlink_bps=figures.downlink_mbps.value * 1e6,
        idle_w=figures.idle_w.value,
        train_w=figures.train_w.value,
        transmit_w=figures.transmit_w.value,
        receive_w=figures.receive_w.value,
        battery_wh=figures.battery_wh.value if figures.battery_wh else None,
        max_celsius=figures.max_celsius.value,
        sensors=figures.sensors.value,
        links=figures.links.value,
        profile=profile,
    )
