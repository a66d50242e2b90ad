"""`edge-coordinator status` of a service: one line for each run."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.commands.control_file import read_control
from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.adoption import adoption_texts
from fleetune.coordinator.queries import queries
from fleetune.coordinator.service.service import OWN, RUNS, ServiceRunStatus, read_statuses
from fleetune.coordinator.store.folder_lock import is_claimed
from fleetune.coordinator.store.run_folder import STATE
from fleetune.protocols.errors import FleetuneError

_PLAIN_WIDTH = 160  # columns in a file or pipe
_COLUMNS = ("run", "fleet", "state", "round", "devices", "adopted", "version", "")
_OF_ADOPTION = ("adopted", "version")  # these columns are left out if no run has a value there


def print_service_status(folder: Path, console: Console | None = None) -> None:
    """Print the state of the service and of its runs.

    Raises:
        StoreError: a file of the service is damaged.
    """
    console = console or Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH, file=console.file)
    at_work = is_claimed(folder / OWN)
    notes = read_statuses(folder)
    rows = [_row(folder, note, at_work=at_work) for note in notes]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, *words in zip(_COLUMNS, *rows, strict=True):
        if any(words) or name not in _OF_ADOPTION:
            table.add_column(name, overflow="fold")
    for row in rows:
        cells = dict(zip(_COLUMNS, row, strict=True))
        table.add_row(*(Text(readable.printable(cells[str(column.header)])) for column in table.columns))
    console.print(table if notes else "no run.toml files")
    if not at_work:
        console.print("no service is at work here: edge-coordinator service FOLDER begins it")


def _row(folder: Path, note: ServiceRunStatus, *, at_work: bool) -> tuple[str, ...]:
    state = note.state if at_work or note.state in ("finished", "wrong", "stopped") else "no service"
    number, devices, adopted, version, words = "", "", "", "", note.words
    run = folder / RUNS / note.name
    try:
        if read_control(run).paused and state == "running":
            state = "paused"
        if (run / STATE).exists():
            found = queries.status(run)
            closed = found.rounds if found.stage == "finished" else found.round - 1
            number = f"{closed}" + ("" if found.rounds is None else f" of {found.rounds}")
            devices = f"{found.devices_there} of {found.devices}" if found.devices else "none yet"
            adopted = ", ".join(adoption_texts(found.adoption, found.score)) if found.adoption else ""
            version = found.latest_version
            if note.pid is not None and at_work:
                words = words or found.problem or found.waits
    except FleetuneError as problem:
        words = words or str(problem)
    return note.name, note.fleet, state, number, devices, adopted, version, words
