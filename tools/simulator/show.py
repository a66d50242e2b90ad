"""What edge-sim shows: a bar with the time left while it runs, then tables, files and pictures."""

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fleetune.coordinator.reports.metrics import AFTER
from fleetune.coordinator.reports.outcome import with_personal
from fleetune.coordinator.reports.summary import Summary
from fleetune.coordinator.reports.tables import device_table, run_table
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.simulator.runner import leave, simulate
from fleetune.tools.simulator.simulated_fleet import simulated_devices

PLAIN_WIDTH = 100  # of a file or pipe
console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def show_run(settings: RunSettings, folder: Path, *, workers: int, fresh: bool) -> Summary:
    """Simulate a run with a progress bar, leave its report in `folder`; its summary."""
    method = settings.method["name"]
    with progress_bar(console) as bar:
        task = bar.add_task(method, total=settings.run.rounds, accuracy="")

        def on_closed(record: RoundRecord) -> None:
            if record.final_evaluation:
                bar.update(task, description=f"{method}, final evaluation")
                return
            accuracy = AFTER.unit.text(AFTER.of_round(record))
            bar.update(task, completed=record.number, accuracy=f"accuracy {accuracy}")

        run, summary = simulate(settings, folder, workers=workers, fresh=fresh, on_closed=on_closed, say=_say)
    boards = {device.name: device.board.name for device in simulated_devices(run.settings)}
    shown = with_personal(summary, run.controller.records())
    files = leave(run, summary)
    console.print(run_table(shown))
    console.print(device_table(shown, boards=boards, limit=10))
    _list(files)
    return summary


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def progress_bar(console: Console) -> Progress:
    """A bar over rounds, with the time left; its tasks have a field `accuracy`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, speed_estimate_period=600)


def _list(files: list[Path]) -> None:
    for file in files:
        if file.suffix in (".html", ".json", ".safetensors"):
            console.print(f"  {file}")
