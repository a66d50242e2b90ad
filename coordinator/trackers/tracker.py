"""What an experiment tracker is, and what it is told of a run: plain numbers by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fleetune.protocols.settings.run_settings import RunSettings

Parameter = bool | int | float | str


@dataclass(frozen=True)
class RoundFigures:
    """A training round that closed.

    Attributes:
        number: from 1.
        figures: by name, those that somebody told; see `coordinator.trackers.figures`.
    """

    number: int
    figures: Mapping[str, float]


@dataclass(frozen=True)
class TrackedRun:
    """A run that a tracker follows from now on.

    Attributes:
        id: no other run has it; one that goes on after a stop keeps it.
        name: for people: the run's folder, inside the folder of runs.
        folder: of the run.
        settings: of the run.
        parameters: the settings that are not what they would be anyway, by `section.key`.
        before: rounds that are closed already, ascending; an open run lets go of its first ones.
        simulated: times are of a virtual clock.
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
    """What a run came to.

    Attributes:
        rounds: that are closed.
        figures: of the whole run, by name.
        files: that it left: summary, rounds, report, pictures.
    """

    rounds: int
    figures: Mapping[str, float]
    files: Sequence[Path]


class Tracker(Protocol):
    """Follows one run. All of it is called in one thread, which is not the run's, and may take its time.

    It is made for a `TrackedRun`, and takes in then those of `before` that it does not have. Whatever it
    raises ends its part of the run; when the run has its report, another is made, with all rounds as
    `before`.
    """

    def hear(self, told: RoundFigures) -> None:
        """Take a round in; one with a number that was there before is in place of that one."""

    def finish(self, outcome: Outcome) -> None:
        """Training is over, and the report is written."""

    def close(self) -> None:
        """Let go of what is held; the run is not at an end where `finish` was not called."""


Make = Callable[[TrackedRun], Tracker]
