"""Board profiles: what each board can do, and how it is recognised. Each board is one TOML file.

Each figure has its source. `load("raspberry-pi-4b")` gives a `Board`, `names()` lists the boards, and
`recognised` finds the board of a machine. `load_file` reads a user's own file, and `save` writes one. A new
board is a new file; see docs/boards.md. `edge_agent.probes` measures what a board really does.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from fleetune.firmware_profiles.recognition import Machine, Recognition, closest
from fleetune.firmware_profiles.schema import Profile, ProfileError, decode, decode_recognition, encode

UNKNOWN = "generic"  # the fallback profile, for which agents claim no capability
_FILES = resources.files(__name__)


@dataclass(frozen=True)
class Board:
    """One board, with the figures of `Figures` converted to bytes, bits and watts.

    Attributes:
        name: name of its file, as in run.toml.
        title: the maker's name for it.
        battery_wh: capacity of its battery; None: it has none.
        profile: content of its file, each figure with its source.
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
    """Names of all boards with a profile, in alphabetical order."""
    files = (entry.name for entry in _FILES.iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


@cache
def load(name: str) -> Board:
    """Load the profile of a board that comes with Fleetune. It is read once.

    Raises:
        KeyError: there is no such board; the message lists all boards.
    """
    if name not in names():
        raise KeyError(f"no board {name!r}; known: {', '.join(names())}")
    return _board(name, decode(*_shipped(name)))


def recognised(machine: Machine) -> str:
    """Name of the board whose profile matches this machine best; `UNKNOWN` if none does."""
    return closest(recognitions(), machine) or UNKNOWN


def recognitions() -> dict[str, Recognition]:
    """The table `[recognise]` of each board that has one, by the board's name."""
    found = {name: decode_recognition(*_shipped(name)) for name in names()}
    return {name: one for name, one in found.items() if one is not None}


def load_file(path: Path, text: str | None = None) -> Board:
    """Read a user's own profile. The board has the file's name.

    Args:
        path: path of the file.
        text: its content, if the caller has read it already.

    Raises:
        ProfileError: the file cannot be read, or its content is wrong.
    """
    if path.stem == UNKNOWN:
        raise ProfileError(
            f"{path}: `{UNKNOWN}` is reserved for the fallback profile, which claims no"
            " capability; rename the file"
        )
    try:
        text = path.read_text(encoding="utf-8") if text is None else text
    except OSError as problem:
        raise ProfileError(f"board {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise ProfileError(f"board {path} is not text in UTF-8; see docs/boards.md") from None
    return _board(path.stem, decode(text, str(path)))


def save(path: Path, profile: Profile) -> None:
    """Write a file that `load_file` can read. The file is replaced as a whole.

    Raises:
        ProfileError: a figure is out of range, or the file cannot be written.
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
    """Content and name of a board's file."""
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
