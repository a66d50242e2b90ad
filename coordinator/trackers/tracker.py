"""Experiment trackers: their interface, the data that they receive of a run, and the built-in trackers.

A built-in tracker is one file and one line of `TRACKERS`. A user-defined tracker is named by
`package.module:function`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import suggestion
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.user_code import as_line, user_module

Parameter = bool | int | float | str


@dataclass(frozen=True)
class RoundFigures:
    """A closed training round.

    Attributes:
        number: number of the round, from 1.
        figures: the known figures by name; see `coordinator.trackers.follow`.
    """

    number: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """A run that a tracker starts to follow.

    Attributes:
        id: unique; a continued run keeps it.
        name: name for people: the run's folder relative to the folder of runs.
        folder: the run's folder.
        settings: settings of the run.
        parameters: settings that differ from their defaults, by `section.key`.
        before: rounds that are already closed, ascending; an open run may have dropped its first rounds.
        simulated: True if times are of a virtual clock.
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
        rounds: number of closed rounds.
        figures: figures of the whole run, by name.
        files: files that the run wrote: summary, rounds, report, pictures.
    """

    rounds: int
    figures: Mapping[str, float]
    files: Sequence[Path]


class Tracker(Protocol):
    """Follows one run. All methods are called in one thread of the tracker's own, so they may be slow.

    A tracker is made for a `TrackedRun` and first processes the rounds of `before` that it lacks. A tracker
    that raises receives no further calls. Once the run's report is written, a new tracker is made with all
    rounds as `before`.
    """

    def hear(self, figures_of_round: RoundFigures) -> None:
        """Process a round; it replaces an earlier round with the same number."""

    def finish(self, outcome: Outcome) -> None:
        """Process the run's result, after training is over and the report is written."""

    def close(self) -> None:
        """Release all resources. If `finish` was not called before, the run was stopped and may continue."""


Make = Callable[[TrackedRun], Tracker]


@dataclass(frozen=True)
class _Known:
    """A built-in tracker.

    Attributes:
        package: import name of the package that it needs.
        install: command that installs the package.
        made_by: `module:class` in this folder.
    """

    package: str
    install: str
    made_by: str

    def make(self, run: TrackedRun) -> Tracker:
        """Make the tracker for a run; imports the package that it needs."""
        module, _, kind = self.made_by.partition(":")
        tracker: Tracker = getattr(import_module(f"fleetune.coordinator.trackers.{module}"), kind)(run)
        return tracker


TRACKERS = {
    "tensorboard": _Known("tensorboard", "pip install tensorboard", "tensorboard:TensorBoard"),
    "mlflow": _Known("mlflow", "pip install mlflow-skinny sqlalchemy alembic", "mlflow:MLflow"),
}


def makers_of(trackers: Iterable[str | Make]) -> dict[str, Make]:
    """Return functions that make the requested trackers, by name, before any heavy package is imported.

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
        hint = suggestion(name, TRACKERS)
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
