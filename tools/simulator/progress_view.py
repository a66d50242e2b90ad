"""Shows a simulated run's progress on a terminal: a bar over rounds, or one line for each round."""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.diagnostics import diagnostics_line
from fleetune.coordinator.metrics.registry import AFTER
from fleetune.coordinator.reports.live import plain_line
from fleetune.coordinator.run.run_events import Notice, RoundClosed, RunBegan, RunEvent
from fleetune.protocols.method.diagnostics import Diagnostic
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks.scores import ACCURACY, Score

PLAIN_WIDTH = 100  # columns of a file or pipe
# a line for people, printed unchanged
PLAINLY: Any = {"highlight": False, "markup": False, "soft_wrap": True}
console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


class RoundsProgress(Progress):
    """Bars over rounds, and below them a line with the latest diagnostics of the method."""

    inside = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.inside:
            line = f"diagnostics: {readable.printable(self.inside)}"
            yield Text(line, "dim", overflow="ellipsis", no_wrap=True)


@dataclass(eq=False)
class RoundBar:
    """Shows a run as a task of a progress bar, and prints messages above the bar.

    Attributes:
        current: description of the round in progress; None if the run has not begun.
        closed: True if a round has ended.
    """

    bar: RoundsProgress
    task: TaskID
    method: str
    diagnostics: Sequence[Diagnostic] = ()
    score: Score = ACCURACY
    current: str | None = None
    closed: bool = False

    def observe(self, event: RunEvent) -> None:
        """Show an event."""
        match event:
            case Notice(line):
                self.bar.console.print(line, **PLAINLY)
            case RunBegan():
                self.current = "round 1"
                for record in event.closed:
                    self.observe(RoundClosed(record))
            case RoundClosed(record) if record.final_evaluation:
                self.bar.update(self.task, description=f"{self.method}, final evaluation")
            case RoundClosed(record):
                self.closed = True
                after = AFTER.for_score(self.score)
                score_text = f"{self.score.title} {after.unit.text(after.of_round(record))}"
                self.bar.inside = diagnostics_line(record, self.diagnostics)
                self.bar.update(self.task, completed=record.number, score=score_text)
                self.current = f"round {record.number + 1}"
                if record.number == self.bar.tasks[self.task].total:
                    self.current = "the final evaluation"


@dataclass(eq=False)
class RoundLines:
    """Prints a line for each round of a run as soon as the round closes.

    Attributes:
        console: console to print on.
        settings: settings of the run.
    """

    console: Console
    settings: RunSettings
    _began: float = field(default_factory=time.monotonic)
    _closed: int = 0

    def observe(self, event: RunEvent) -> None:
        """Handle an event of the run."""
        if isinstance(event, RoundClosed):
            self._closed += 1
            left = "" if event.record.final_evaluation else self._time_left(event.record.number)
            self.console.print(plain_line(event.record, self.settings) + left, **PLAINLY)
            self.console.file.flush()

    def _time_left(self, number: int) -> str:
        """Return the predicted time of the later rounds on this machine; empty if the run has no end."""
        last = self.settings.run.last_round
        if last is None:
            return ""
        a_round = (time.monotonic() - self._began) / self._closed
        return f"  {readable.duration(a_round * (last - number))} left here"


def progress_bar(console: Console, *, shown: bool = True) -> RoundsProgress:
    """Return a bar over rounds with the remaining time; its tasks have a field `score`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TextColumn("{task.fields[score]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return RoundsProgress(*columns, console=console, speed_estimate_period=600, disable=not shown)
