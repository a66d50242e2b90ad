"""The axes of a sweep: settings, each with its values or with a range for a search."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import plain
from fleetune.protocols.toml_text import parse_value
from fleetune.tools.compare.comparison import Configuration, as_text
from fleetune.tools.compare.tables import short_names

MOST_RUNS = 100_000
_USAGE = (
    "--over {}: use section.key=value,value, e.g. training.learning_rate=0.01,0.05,"
    " or with --search a range, e.g. training.learning_rate=0.01..0.2:log"
)
_INSTEAD = {"run.seed": "--seeds", "run.name": "a copy of the run file", "method": "method.KEY"}
_RANGE = re.compile(r"\s*([-+\w.]+?)\s*\.\.\s*([-+\w.]+?)\s*(:log)?\s*")


@dataclass(frozen=True)
class Axis:
    """A setting and the values that a sweep tries."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    """A setting and the range of its values, both ends included; whole numbers if both ends are whole.

    Attributes:
        log: True draws values by their logarithm: as many between 0.01 and 0.1 as between 0.1 and 1.
    """

    key: str
    low: float
    high: float
    log: bool = False

    @property
    def words(self) -> str:
        """The range in the form of `--over`."""
        return f"{self.low}..{self.high}" + (":log" if self.log else "")

    @property
    def values(self) -> tuple[float, float]:
        """The lower and the upper end."""
        return self.low, self.high

    @property
    def is_whole(self) -> bool:
        """True if the values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


Axes = Sequence[Axis | Range]


def axes_of(over: Sequence[str] | Mapping[str, Sequence[Any] | str]) -> list[Axis | Range]:
    """Return the axes that `--over` names.

    Args:
        over: texts `section.key=value,value` with values as in TOML (bare words are text), or
            `section.key=low..high`. Or a dict of values, or of a range as text, by `section.key`.

    Raises:
        SettingError: an entry has a wrong form, or a setting or a value occurs twice.
    """
    if isinstance(over, Mapping):
        axes = [
            _axis(f"{key}={values}") if isinstance(values, str) else Axis(key, tuple(map(plain, values)))
            for key, values in over.items()
        ]
    else:
        axes = [_axis(one) for one in over]
    if not axes:
        raise SettingError("--over: name at least one setting, e.g. --over training.learning_rate=0.01,0.05")
    keys = [axis.key for axis in axes]
    for axis in axes:
        if axis.key in _INSTEAD or axis.key.startswith("compare."):
            raise SettingError(f"--over {axis.key}: use {_INSTEAD.get(axis.key, 'edge-sim compare')} instead")
        if keys.count(axis.key) > 1:
            raise SettingError(f"--over {axis.key} is named twice; give all its values at once")
        if isinstance(axis, Axis):
            _check(axis)
    return axes


def combinations(settings: RunSettings, axes: Axes, num_seeds: int) -> list[Configuration]:
    """Return a configuration for each combination of values; the values of the last axis change first.

    Raises:
        SettingError: an axis is a range, or there are too many combinations.
    """
    for axis in axes:
        if isinstance(axis, Range):
            raise SettingError(f"--over {axis.key}={axis.words}: a range needs --search, e.g. --search 40")
    num_runs = prod(len(axis.values) for axis in axes) * num_seeds
    if num_runs > MOST_RUNS:
        raise SettingError(
            f"--over: {num_runs:,} runs, but at most {MOST_RUNS:,} are allowed: give fewer values or seeds"
        )
    keys = [axis.key for axis in axes]
    return [
        combination(settings, dict(zip(keys, values, strict=True)))
        for values in product(*(axis.values for axis in axes))
    ]


def combination(settings: RunSettings, values: Mapping[str, Any]) -> Configuration:
    """Return the run file's settings with these values, by `section.key`."""
    names = short_names(list(values))
    label = ", ".join(f"{short}={as_text(one)}" for short, one in zip(names, values.values(), strict=True))
    changes = dict(values)
    name = changes.pop("method.name", settings.method["name"])
    own = settings.method if name == settings.method["name"] else {"name": name}
    return Configuration(label, own, changes)


def _check(axis: Axis) -> None:
    if not axis.values:
        raise SettingError(_USAGE.format(axis.key))
    values = [as_text(one) for one in axis.values]
    twice = next((one for one in values if values.count(one) > 1), None)
    if twice is not None:
        raise SettingError(f"--over {axis.key}: {twice} is named twice")


def _axis(text: str) -> Axis | Range:
    key, separator, values = text.partition("=")
    key = key.strip()
    if not separator or "." not in key:
        raise SettingError(_USAGE.format(text))
    if found := _RANGE.fullmatch(values):
        return _range(key, *found.groups())
    listed = parse_value(f"[{values}]")
    if isinstance(listed, list):
        return Axis(key, tuple(listed))
    return Axis(key, tuple(parse_value(one) for one in values.split(",") if one.strip()))


def _range(key: str, low_text: str, high_text: str, log: str | None) -> Range:
    low, high = parse_value(low_text), parse_value(high_text)
    numbers = [one for one in (low, high) if isinstance(one, int | float) and not isinstance(one, bool)]
    words = f"{low_text}..{high_text}{log or ''}"
    if len(numbers) < 2:
        raise SettingError(f"--over {key}={words}: a range needs two numbers, e.g. 0.01..0.2")
    if not -float("inf") < low < high < float("inf"):
        raise SettingError(f"--over {key}={words}: the first number must be less than the second")
    if log and low <= 0:
        raise SettingError(f"--over {key}={words}: `:log` needs numbers above 0")
    return Range(key, low, high, log is not None)
