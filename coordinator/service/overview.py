"""`edge-coordinator status` of a service: a line a run, from what the service and each run's store say."""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.adoption import adoption_so_far
from fleetune.coordinator.metrics.adoption_words import adoption_words
from fleetune.coordinator.reports.due import held_by
from fleetune.coordinator.reports.missing import waiting_for
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.coordinator.run.stored_run import stored_run
from fleetune.coordinator.service.service import OWN, RUNS, RunNote, notes_of
from fleetune.coordinator.store.broker_outage import read_outage
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.coordinator.store.folder_lock import is_claimed
from fleetune.coordinator.store.orders import read_orders
from fleetune.coordinator.store.release_store import read_rollout
from fleetune.coordinator.store.run_folder import STATE
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.tasks import task_of

_PLAIN_WIDTH = 160  # of a file or pipe
_COLUMNS = ("run", "fleet", "state", "round", "devices", "adopted", "version", "")
_OF_ADOPTION = ("adopted", "version")  # left out where no run has anything there


def show_overview(folder: Path, console: Console | None = None) -> None:
    """Print how the service and its runs stand.

    Raises:
        StoreError: what the service left is damaged.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH, file=console.file)
    at_work = is_claimed(folder / OWN)
    notes = notes_of(folder)
    rows = [_row(folder, note, at_work=at_work) for note in notes]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, *words in zip(_COLUMNS, *rows, strict=True):
        if any(words) or name not in _OF_ADOPTION:
            table.add_column(name, overflow="fold")
    for row in rows:
        told = dict(zip(_COLUMNS, row, strict=True))
        table.add_row(*(Text(readable.printable(told[str(column.header)])) for column in table.columns))
    console.print(table if notes else "no run.toml files")
    if not at_work:
        console.print("no service is at work here: edge-coordinator service FOLDER begins it")


def _row(folder: Path, note: RunNote, *, at_work: bool) -> tuple[str, ...]:
    state = note.state if at_work or note.state in ("finished", "wrong", "stopped") else "no service"
    number, devices, adopted, version, words = "", "", "", "", note.words
    run = folder / RUNS / note.name
    try:
        if read_orders(run).paused and state == "running":
            state = "paused"
        if (run / STATE).exists():
            number, devices, waits = _stands(run)
            adopted, version = _serves(run)
            words = words or (waits if note.pid is not None and at_work else "")
    except FleetuneError as problem:
        words = words or str(problem)
    return note.name, note.fleet, state, number, devices, adopted, version, words


def _stands(run: Path) -> tuple[str, str, str]:
    """Rounds closed, devices there, and what the open or coming round waits for."""
    with stored_run(run) as kept:
        state, settings, outage = read_engine(kept.store), kept.settings, read_outage(kept.store)
    now = time.time()
    if state is None:
        waits = "waits for its first device" if outage is None else outage.words(now)
        return "", "none yet", waits
    last = settings.run.last_round
    closed = f"{state.rounds_done}" + ("" if last is None else f" of {last}")
    there = sum(member.ready for member in state.members.values())
    if outage is not None:
        waits = outage.words(now)
    else:
        held = held_by(state, schedule_of(settings.schedule), max(state.seen_at, now - state.ahead_s))
        waits = waiting_for(state, settings.round, held)
    return closed, f"{there} of {len(state.members)}", waits


def _serves(run: Path) -> tuple[str, str]:
    """Who uses what the fleet led to, as they told last, and what that gained; which version of the shared
    model is out, and which on trial. "" where the run has nothing of it.
    """
    with stored_run(run) as kept:
        rollout, task = read_rollout(kept.store), task_of(kept.settings.task)
        found = adoption_so_far(kept.store.records()) if kept.settings.adoption.enabled else None
    adopted = "" if found is None else ", ".join(adoption_words(found, task.score))
    return adopted, "" if rollout is None else rollout.short
