"""Experiment trackers: what one is and what it gets of a run, and those that are known by name.

A known tracker is one file and one line of `TRACKERS`. A user's own is `package.module:function`.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.user_code import as_line, user_module

Parameter = bool | int | float | str


@dataclass(frozen=True)
class RoundFigures:
    """A training round that closed.

    Attributes:
        number: from 1.
        figures: by name, those that are known; see `coordinator.trackers.follow`.
    """

    number: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """A run that a tracker follows from now on.

    Attributes:
        id: unique; a run that goes on after a stop keeps it.
        name: for people: the run's folder, inside the folder of runs.
        folder: of the run.
        settings: of the run.
        parameters: the settings that differ from their defaults, by `section.key`.
        before: rounds that are closed already, ascending; an open run no longer has its first ones.
        simulated: whether times are of a virtual clock.
    """

    id: str
    name: str
    folder: Path
    settings: RunSettings
    parameters: Mapping[str, Parameter]
    before: Sequence[RoundFigures]
    simulated: bool


@dataclass(frozen=True)
class Outcome:
    """The result of a run.

    Attributes:
        rounds: that are closed.
        figures: of the whole run, by name.
        files: that it left: summary, rounds, report, pictures.
    """

    rounds: int
    figures: Mapping[str, float]
    files: Sequence[Path]


class Tracker(Protocol):
    """Follows one run. All methods are called in one thread of its own, and may take their time.

    It is made for a `TrackedRun`, and first takes in those of `before` that it does not have. If it raises,
    it gets nothing more. When the run has its report, another is made, with all rounds as `before`.
    """

    def hear(self, told: RoundFigures) -> None:
        """Take in a round; one with the number of an earlier round replaces that."""

    def finish(self, outcome: Outcome) -> None:
        """Take in the result of the run; training is over, and the report is written."""

    def close(self) -> None:
        """Release what is held. Without `finish` before, the run was stopped and may go on."""


Make = Callable[[TrackedRun], Tracker]


@dataclass(frozen=True)
class _Known:
    """A tracker that comes with Fleetune.

    Attributes:
        package: that it needs, as it is imported.
        install: the command that installs it.
        made_by: `module:class` in this folder.
    """

    package: str
    install: str
    made_by: str

    def make(self, run: TrackedRun) -> Tracker:
        """The tracker for a run; imports what it needs."""
        module, _, kind = self.made_by.partition(":")
        tracker: Tracker = getattr(import_module(f"fleetune.coordinator.trackers.{module}"), kind)(run)
        return tracker


TRACKERS = {
    "tensorboard": _Known("tensorboard", "pip install tensorboard", "tensorboard:TensorBoard"),
    "mlflow": _Known("mlflow", "pip install mlflow-skinny sqlalchemy alembic", "mlflow:MLflow"),
}


def makers_of(trackers: Iterable[str | Make]) -> dict[str, Make]:
    """What makes each tracker that is asked for, by its name; imports nothing heavy yet.

    Raises:
        SettingError: no tracker has that name, or the package that it needs is not installed.
    """
    makers: dict[str, Make] = {}
    for one in trackers:
        if isinstance(one, str):
            makers[one] = _users(one) if ":" in one else _known(one).make
            continue
        name = getattr(one, "__name__", type(one).__name__)
        makers[f"{name} {len(makers) + 1}" if name in makers else name] = one
    return makers


def _known(name: str) -> _Known:
    known = TRACKERS.get(name)
    if known is None:
        near = difflib.get_close_matches(name, TRACKERS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(TRACKERS)}"
        raise SettingError(f"tracker {name}: there is none; {hint} (or package.module:function of yours)")
    if find_spec(known.package) is None:
        raise SettingError(f"tracker {name}: it is not installed here: {known.install}")
    return known


def _users(name: str) -> Make:
    module, _, function = name.partition(":")
    try:
        make: Make = getattr(user_module(module), function)
    except Exception as problem:  # noqa: BLE001 - a user's module may raise anything
        raise SettingError(f"tracker {name}: {as_line(problem)}") from None
    return make
