"""The format of a board's TOML file, and how it is read and written."""

import json
import re
import tomllib
from typing import Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from fleetune.firmware_profiles.recognition import Recognition

ESTIMATE = "estimate"
MEASURED = "measured"

Sensor = Literal["power_supply", "ina3221", "ina238", "pmic", "rapl", "termux", "thermal", "throttled"]
Link = Literal["4g", "rural-dsl", "lora-backhaul", "factory-wifi", "lan"]

_T = TypeVar("_T")
_Count = Annotated[int, Meta(ge=1, le=1024)]
_Mebibytes = Annotated[int, Meta(ge=16, le=4_194_304)]
_Speed = Annotated[float, Meta(gt=0, le=100_000)]
_Watts = Annotated[float, Meta(gt=0, le=2_000)]
_WattHours = Annotated[float, Meta(gt=0, le=10_000)]
_Celsius = Annotated[float, Meta(ge=20, le=150)]


class ProfileError(ValueError):
    """A board's file is missing or wrong. `str()` names the file, the key and the allowed values in one
    line.
    """


class Figure(Struct, Generic[_T], frozen=True, forbid_unknown_fields=True):
    """One figure of a board.

    Attributes:
        value: the value, in the unit that the key names.
        source: a link, "estimate", or "measured" on this very board.
        note: how it was estimated or measured.
    """

    value: _T
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        if self.source not in (ESTIMATE, MEASURED) and not re.match(r"https?://\S+$", self.source):
            raise ValueError(f"source is {self.source!r}; it must be a link, {ESTIMATE!r} or {MEASURED!r}")


class Figures(Struct, frozen=True, forbid_unknown_fields=True):
    """All figures of a board. Each is required, except the battery.

    Attributes:
        cores: number of processor cores.
        memory_mib: fitted memory in MiB.
        training_gflops: effective speed of training with one thread, in 1e9 floating-point operations a
            second. Agents train with one thread by default; see docs/boards.md.
        uplink_mbps, downlink_mbps: speed of a typical link of such boards, in Mbit/s.
        idle_w, train_w, transmit_w, receive_w: power of the whole board in watts: idle, training with one
            thread, uploading, downloading.
        max_celsius: temperature of the hottest thermal zone at which the board throttles itself.
        sensors: sensors of its power and heat.
        links: presets of `edge-sim link presets` that are typical for such boards.
        battery_wh: capacity of its full battery in Wh; None: it has no battery.
    """

    cores: Figure[_Count]
    memory_mib: Figure[_Mebibytes]
    training_gflops: Figure[_Speed]
    uplink_mbps: Figure[_Speed]
    downlink_mbps: Figure[_Speed]
    idle_w: Figure[_Watts]
    train_w: Figure[_Watts]
    transmit_w: Figure[_Watts]
    receive_w: Figure[_Watts]
    max_celsius: Figure[_Celsius]
    sensors: Figure[tuple[Sensor, ...]]
    links: Figure[tuple[Link, ...]]
    battery_wh: Figure[_WattHours] | None = None

    def __post_init__(self) -> None:
        for key in ("train_w", "transmit_w", "receive_w"):
            busy = getattr(self, key).value
            if busy < self.idle_w.value:
                raise ValueError(
                    f"{key} is {busy:g}, less than idle_w = {self.idle_w.value:g}; it must not be less"
                )


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """The profile in a board's file. Agents store it with their state of a run.

    Attributes:
        title: the maker's name for the board.
        figures: what it can do.
    """

    title: Annotated[str, Meta(min_length=1, max_length=100)]
    figures: Figures


class _File(Profile, frozen=True, forbid_unknown_fields=True):
    """All of a board's file.

    Attributes:
        recognise: how a machine is recognised as this board; None: only a user can choose it, by name.
    """

    recognise: Recognition | None = None


def stated(figures: Figures) -> dict[str, Figure[object]]:
    """The figures that are given, by key, in the order of the schema."""
    named = {key: getattr(figures, key) for key in Figures.__struct_fields__}
    return {key: figure for key, figure in named.items() if figure is not None}


def decode(text: str, where: str) -> Profile:
    """Read a board's TOML.

    Args:
        text: content of the file.
        where: name of the file, for errors.

    Raises:
        ProfileError: `text` is not TOML, or a key is missing, unknown or out of range.
    """
    file = _read(text, where)
    return Profile(file.title, file.figures)


def decode_recognition(text: str, where: str) -> Recognition | None:
    """Read the table `[recognise]` of a board's TOML; None: it has none.

    Args:
        text: content of the file.
        where: name of the file, for errors.

    Raises:
        ProfileError: as `decode`.
    """
    return _read(text, where).recognise


def encode(profile: Profile) -> str:
    """Write a profile as TOML that `decode` can read."""
    lines = (_line(key, figure) for key, figure in stated(profile.figures).items())
    return "\n".join([f"title = {_toml(profile.title)}", "", "[figures]", *lines, ""])


def _read(text: str, where: str) -> _File:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:  # ValueError: also a whole number with too many digits
        raise ProfileError(f"{where} is not valid TOML: {problem}; {_REMEDY}") from None
    try:
        return msgspec.convert(content, _File)
    except msgspec.ValidationError as problem:
        raise ProfileError(f"{where}: {_explain(str(problem))}; {_REMEDY}") from None


_REMEDY = 'see docs/boards.md, or use the board "generic"'


def _explain(problem: str) -> str:
    """Rewrite a validation error of msgspec in the words of the file, with the key first."""
    said, _, path = " ".join(problem.replace("`", "").split()).partition(" - at ")
    key = path.removeprefix("$").lstrip(".")
    for start, verdict in (("missing required field ", "is missing"), ("unknown field ", "is unknown")):
        _, found, field = said.partition(start)
        if found:
            return f"{f'{key}.{field}'.lstrip('.')} {verdict}"
    return f"{key}: {said[0].lower()}{said[1:]}" if key else said


def _line(key: str, figure: Figure[object]) -> str:
    parts = {"value": figure.value, "source": figure.source, "note": figure.note}
    inside = ", ".join(f"{name} = {_toml(part)}" for name, part in parts.items() if part != "")
    return f"{key} = {{ {inside} }}"


def _toml(value: object) -> str:
    """Write a string, number or list of strings as TOML. JSON is the same, except for the character DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
