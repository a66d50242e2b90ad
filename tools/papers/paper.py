"""edge-sim paper: run the cells of the papers' tables, and show the paper's number and ours."""

import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleetune.protocols.errors import DataError, FleetuneError, SettingError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare.comparison import Configuration
from fleetune.tools.compare.configurations import folder_name, seeds_of
from fleetune.tools.compare.engine import Execution, Experiment, run_experiment
from fleetune.tools.compare.finished_run import FinishedRun
from fleetune.tools.compare.sheets import rich_table
from fleetune.tools.papers.cells import cell_names, read_cell
from fleetune.tools.papers.measures import (
    MEASURES,
    CellResult,
    Label,
    label_of,
    measures_with,
    number,
    number_of,
    paper_of,
)
from fleetune.tools.papers.traffic import Traffic, count_traffic
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES

ALL = "all"


def list_cells(console: Console) -> None:
    """Show all cells and their requirements."""
    table = Table(box=None, pad_edge=False)
    table.add_column("cell", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("CPU min\na seed", justify="right")
    table.add_column("what it is; the data it needs")
    for name in cell_names():
        cell, _ = read_cell(name)
        paper, unit = paper_of(cell), MEASURES[paper_of(cell).accuracy].unit
        what = f"{'; '.join((paper.table, *paper.scaled))}\n{cell.data.source}"
        value = f"{number(paper.value, paper.deviation, unit)} {unit}"
        table.add_row(name, value, f"{paper.cpu_minutes:g}", escape(what))
    console.print(table)
    console.print("data: a folder of original files, here, in $FLEETUNE_DATA, or given with --data FOLDER")


def run_cell(
    name: str, execution: Execution, *, seeds: int, changes: Sequence[str] = (), data: str | None = None
) -> CellResult:
    """Run the unfinished seeds of a cell; show and store the paper's number and ours.

    Args:
        name: see `read_cell`.
        execution: how the runs are executed; its folder is RUNS/paper. A cell without changes is stored in
            NAME there, one with changes in a folder that is named after them.
        seeds: number of runs.
        changes: see `read_cell`.
        data: see `read_cell`.

    Raises:
        SettingError, DataError: the cell, a change or the data is wrong; nothing was executed.
        FleetuneError: some seeds failed; the result has the others.
        KeyboardInterrupt: interrupted; the result has the finished seeds.
    """
    cell, asked = read_cell(name, changes, data)
    command = command_line("paper", name, seeds, changes, data)
    return run_cell_settings(Path(name).stem, cell, asked, command, seeds, execution)


def run_cell_settings(
    name: str, cell: RunSettings, asked: RunSettings, command: str, seeds: int, execution: Execution
) -> CellResult:
    """As `run_cell`, for a cell's settings and the settings that `command` requests."""
    chosen = seeds_of(asked, seeds)
    if asked.run.is_open:
        raise SettingError('run.rounds = "open": a cell of a paper needs a number of rounds')
    paper = paper_of(cell)
    counted = MEASURES[paper.accuracy].counted
    label = label_of(cell, asked, paper.samples if counted else _num_samples(asked))
    experiment = _experiment(name, label, asked, chosen)
    folder = execution.folder / folder_name(experiment.configurations[0].label)
    results: list[CellResult] = []

    def finish(runs: Sequence[FinishedRun], traffic: Mapping[int, Traffic]) -> None:
        result = CellResult(name, paper, label, runs, traffic)
        results.append(result)
        _write(result, folder, command, asked)
        execution.console.print(table_of(result))
        execution.console.print(f"  {folder / 'result.json'}", soft_wrap=True)

    if counted:
        planned = [run.settings for run in experiment.planned(execution)]
        finish([], {settings.run.seed: count_traffic(settings) for settings in planned})
    else:
        run_experiment(experiment, execution, lambda outcome: finish(outcome.comparison.runs, {}))
    return results[0]


def finished_result(
    name: str, cell: RunSettings, asked: RunSettings, seeds: int, execution: Execution
) -> CellResult | None:
    """Return the result of the finished runs of a cell; None if there are none.

    It executes nothing and reads no data: it assumes that the source is that of the paper.
    """
    paper = paper_of(cell)
    if MEASURES[paper.accuracy].counted:
        return None
    label = label_of(cell, asked, paper.samples)
    experiment = _experiment(name, label, asked, seeds_of(asked, seeds))
    runs = experiment.results(experiment.planned(execution)).runs
    return CellResult(name, paper, label, runs) if runs else None


def _experiment(name: str, label: Label, asked: RunSettings, seeds: Sequence[int]) -> Experiment:
    configuration = Configuration(",".join((name, *label.changes)), asked.method)
    return Experiment(replace(asked, paper=None), [configuration], seeds)


def _num_samples(settings: RunSettings) -> int:
    try:
        return len(NO_CALLER_SAMPLES.samples(settings).y)
    except DataError as problem:
        raise DataError(f"{problem}; or name the original files' folder with --data FOLDER") from None


def run_cells(pattern: str, execution: Execution, *, seeds: int, changes: Sequence[str] = ()) -> None:
    """Run all cells that match a pattern (`all`: every cell), the cheapest first.

    A cell that cannot be run is skipped with a line. At the end one table shows all results.

    Raises:
        SettingError: no cell matches.
        KeyboardInterrupt: interrupted; the same command continues.
    """
    names, console = cell_names("*" if pattern == ALL else pattern), execution.console
    if not names:
        raise SettingError(f"no cell matches {pattern!r}; known: {', '.join(cell_names())}")
    results: list[CellResult] = []
    for name in sorted(names, key=lambda name: paper_of(read_cell(name)[0]).cpu_minutes):
        console.print(f"{name}:")
        try:
            results.append(run_cell(name, execution, seeds=seeds, changes=changes))
        except FleetuneError as problem:
            console.print(f"{name}: skipped: {problem}")
    rows = ([one.name, *(f"{text} {one.unit}" for text in one.texts), str(one.label)] for one in results)
    if results:
        console.print(rich_table(["cell", "paper", "ours", "label"], rows))


def command_line(command: str, name: str, seeds: int, changes: Sequence[str], data: str | None = None) -> str:
    """Return the command that reproduces a result."""
    words = ["edge-sim", command, name, "--seeds", str(seeds)]
    words += [word for change in changes for word in ("--set", change)]
    return shlex.join(words + (["--data", data] if data else []))


def _write(result: CellResult, folder: Path, command: str, settings: RunSettings) -> None:
    content: dict[str, Any] = {
        **result.as_dict(),
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "settings": msgspec.to_builtins(replace(settings, paper=None)),
    }
    data = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
    write_atomically(folder / "result.json", data, durable=False, mode=None)


def table_of(result: CellResult) -> Table:
    """Return a table for the terminal: the paper's number and ours, then the other measures of our runs."""
    title = escape(f"{result.paper.table}\n{result.label}")
    table = Table(title=title, caption=result.verdict, title_justify="left", caption_justify="left")
    for head in ("", "paper", "ours", "seeds"):
        table.add_column(head, justify="right" if head else "left")
    for name in measures_with(result.paper.accuracy):
        found, measure = result.measured(name), MEASURES[name]
        theirs = result.texts[0] if name == result.paper.accuracy else ""
        ours = number_of(found, measure.unit)
        table.add_row(f"{measure.about}, {measure.unit}", theirs, ours, str(found.count if found else 0))
    return table
