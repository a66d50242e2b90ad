"""`edge-coordinator status`: one screen on a run as its store has it, while a coordinator is at it or not."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fleetune.coordinator.reports.live import LiveView, plain_line
from fleetune.coordinator.reports.missing import waiting_for
from fleetune.coordinator.reports.run_watch import Watch
from fleetune.coordinator.reports.snapshot import Snapshot
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.store.broker_outage import Outage, read_outage
from fleetune.coordinator.store.device_rows import read_engine, read_ledger
from fleetune.coordinator.store.folder_lock import is_claimed
from fleetune.coordinator.store.release_store import read_rollout
from fleetune.coordinator.store.troubles import read_troubles
from fleetune.protocols.settings.run_settings import RunSettings

LOOK_EVERY_S = 1.0
_PLAIN_WIDTH, _PLAIN_HEIGHT = 100, 1000  # of a file or pipe
_STOPPED = "no coordinator is at it: it goes on when it is served again; what stands here is how it was left"


@dataclass(frozen=True)
class Status:
    """A run at one moment.

    Attributes:
        settings: of the run.
        state: of its engine.
        records: of closed rounds, ascending.
        shot: for the screen.
        running: a coordinator is at it.
        outage: of its broker; None: it is reached, or no coordinator is at it.
        troubles: what is wrong while it goes on, a line each.
    """

    settings: RunSettings
    state: EngineState
    records: list[RoundRecord]
    shot: Snapshot
    running: bool
    outage: Outage | None = None
    troubles: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Whether the run is finished, and nothing more will come."""
        return self.state.stage == "finished" and not self.running

    @property
    def waits(self) -> str:
        """Whom the open or coming round waits for; "" when nobody is at it."""
        return waiting_for(self.state, self.settings.round, self.shot.holds) if self.running else ""


def status_of(folder: Path, now: float) -> Status:
    """How a run stands.

    Args:
        folder: of the run.
        now: on the wall clock, seconds.

    Raises:
        SettingError, StoreError: see `runs.stored_run`.
    """
    running = is_claimed(folder)
    with stored_run(folder) as run:
        state, ledger = read_engine(run.store) or EngineState(), read_ledger(run.store)
        records, rollout = run.store.records(), read_rollout(run.store)
        outage = read_outage(run.store) if running else None
        troubles = tuple(read_troubles(run.store).values())
    watch = Watch(run.settings, run.enrolment.spec.num_parameters)
    for record in records:
        watch.note(record)
    stopped = not running and state.stage != "finished"
    at = max(now, state.seen_at) if running else state.seen_at  # the time of day may have been set back
    problem = _STOPPED if stopped else None if outage is None else outage.words(now)
    shot = watch.snapshot(state, ledger, at, problem=problem, rollout=rollout)
    return Status(run.settings, state, records, shot, running, outage, troubles)


class StatusFigures(Struct, frozen=True):
    """What `status --json` prints.

    Attributes:
        run: name of the run.
        running: whether a coordinator is at it.
        stage: of the run: waiting, training, finished ...
        round, rounds: the open or coming round, of how many; null: the run is open.
        devices, devices_there: how many are known, and how many are connected and ready.
        waits: what the open or coming round waits for; "" for nothing.
        broker_down_since: seconds of the epoch; null: the broker is reached, or no coordinator is at the run.
        problem: what keeps the run from going on, in one line; "" for nothing.
        troubles: what is wrong while it goes on, a line each.
    """

    run: str
    running: bool
    stage: str
    round: int
    rounds: int | None
    devices: int
    devices_there: int
    waits: str
    broker_down_since: float | None
    problem: str
    troubles: tuple[str, ...]


def print_figures(folder: Path) -> None:
    """Print a run's status as one JSON object. Raises as `status_of`."""
    status = status_of(folder, time.time())
    shot, members = status.shot, status.state.members.values()
    figures = StatusFigures(
        run=shot.name,
        running=status.running,
        stage=shot.stage,
        round=shot.round,
        rounds=shot.rounds,
        devices=len(members),
        devices_there=sum(member.ready for member in members) if status.running else 0,
        waits=shot.holds or status.waits,
        broker_down_since=None if status.outage is None else status.outage.since,
        problem=shot.problem,
        troubles=status.troubles,
    )
    print(msgspec.json.encode(figures).decode())


def show_status(folder: Path, console: Console | None = None) -> None:
    """Print one screen. Raises as `status_of`."""
    console = console or _console()
    console.print(_screen(status_of(folder, time.time()), console))


def follow(folder: Path, console: Console | None = None, pause: Callable[[float], None] = time.sleep) -> None:
    """Show the run until it is over: a screen on a terminal, else a line a round.

    Args:
        folder: of the run.
        console: to show it on.
        pause: waits so many seconds.

    Raises:
        SettingError, StoreError: see `runs.stored_run`.
    """
    console = console or _console()
    if not console.is_terminal:
        _follow_plainly(folder, console, pause)
        return
    status = status_of(folder, time.time())
    with Live(_screen(status, console), console=console, auto_refresh=False) as live:
        while not status.over:
            pause(LOOK_EVERY_S)
            status = status_of(folder, time.time())
            live.update(_screen(status, console), refresh=True)


def _follow_plainly(folder: Path, console: Console, pause: Callable[[float], None]) -> None:
    told, said = 0, ""
    while True:
        status = status_of(folder, time.time())
        for record in status.records:
            if record.number > told:  # of an open run older ones are downsampled out
                _say(console, plain_line(record, status.settings))
        told = max((record.number for record in status.records), default=told)
        word = status.shot.problem or status.waits
        if word != said and not status.over:
            _say(console, word)
        said = word
        if status.over:
            _say(console, f"finished: {status.state.reason}")
            return
        pause(LOOK_EVERY_S)


def _say(console: Console, line: str) -> None:
    if line:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _screen(status: Status, console: Console) -> RenderableType:
    """In one screen of the console."""
    word = "" if status.shot.holds else status.waits  # the view says that itself
    words = [*status.troubles, *([word] if word else [])]
    lines = [Text(line, "yellow", overflow="fold") for line in words]
    used = sum(-(-len(line.plain) // console.width) for line in lines)
    height = console.height if console.is_terminal else _PLAIN_HEIGHT
    view = LiveView(status.shot).render(width=console.width, height=max(1, height - used))
    return Group(view, *lines)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)
