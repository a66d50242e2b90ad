"""`edge-coordinator status`: the status of a run on one screen, even if no coordinator serves it."""

import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from fleetune.coordinator.queries import queries
from fleetune.coordinator.queries.queries import status_and_devices
from fleetune.coordinator.queries.run_status import DeviceStatus, RunStatus
from fleetune.coordinator.reports.live import LiveView, plain_line
from fleetune.coordinator.run.stored_run import stored_run

LOOK_EVERY_S = 1.0
_PLAIN_WIDTH, _PLAIN_HEIGHT = 100, 1000  # columns for a file or pipe


def show_status(folder: Path, console: Console | None = None) -> None:
    """Print the status of a run on one screen. Raises the errors of `queries.status`."""
    console = console or _console()
    console.print(_screen(*status_and_devices(folder), console))


def follow(folder: Path, console: Console | None = None, pause: Callable[[float], None] = time.sleep) -> None:
    """Show the run until it is over: a live screen on a terminal, otherwise one line for each round.

    Args:
        folder: the run's folder.
        console: console to print on.
        pause: function that waits a number of seconds.

    Raises:
        SettingError, StoreError: as `queries.status`.
    """
    console = console or _console()
    if not console.is_terminal:
        _follow_in_lines(folder, console, pause)
        return
    status, devices = status_and_devices(folder)
    with Live(_screen(status, devices, console), console=console, auto_refresh=False) as live:
        while not status.over:
            pause(LOOK_EVERY_S)
            status, devices = status_and_devices(folder)
            live.update(_screen(status, devices, console), refresh=True)


def _follow_in_lines(folder: Path, console: Console, pause: Callable[[float], None]) -> None:
    with stored_run(folder) as run:
        settings = run.settings
    shown, said = 0, ""
    while True:
        status, closed = queries.status(folder), queries.rounds(folder)
        for record in closed:
            if record.number > shown:
                _say(console, plain_line(record, settings))
        # the number is lower after a rollback
        shown = max((record.number for record in closed), default=shown)
        if status.over:
            _say(console, f"finished: {status.ended}")
            return
        line = status.problem or (
            f"round {status.round}: {status.scheduled}" if status.scheduled else status.waits
        )
        if line != said:
            _say(console, line)
        said = line
        pause(LOOK_EVERY_S)


def _say(console: Console, line: str) -> None:
    if line:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _screen(status: RunStatus, devices: tuple[DeviceStatus, ...], console: Console) -> RenderableType:
    """Return the live view and what the round waits for, as one screen."""
    waits = "" if status.scheduled else status.waits  # the view already shows the schedule's reason
    lines = [
        Text(one, "yellow", overflow="fold")
        for one in filter(None, [*status.troubles, *status.outliers, waits])
    ]
    used = sum(-(-len(line.plain) // console.width) for line in lines)
    height = console.height if console.is_terminal else _PLAIN_HEIGHT
    view = LiveView(status, devices).render(width=console.width, height=max(1, height - used))
    return Group(view, *lines)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)
