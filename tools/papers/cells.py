"""edge-sim paper: the cells of tools/papers as runs, kept seed by seed, and their tables."""

import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleetune.coordinator.metrics.readable import UNKNOWN, percent
from fleetune.protocols.errors import DataError, FleetuneError, SettingError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.methods import from_section, with_defaults_of_run
from fleetune.protocols.settings.rate_schedule import with_schedule_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare.cells import Cell, RoundDone, again, finished, forget, play_all
from fleetune.tools.papers.cell_files import cell_names, read_cell
from fleetune.tools.papers.measures import MEASURES, Label, Outcome, label_of, measures_beside, points
from fleetune.tools.papers.traffic import count_traffic
from fleetune.tools.simulator.show import progress_bar
from fleetune.tools.stop_signals import ToldInterrupt

ALL = "all"


def list_cells(console: Console) -> None:
    """Show what there is and what it needs."""
    table = Table(box=None, pad_edge=False)
    table.add_column("cell", no_wrap=True)
    table.add_column("paper", no_wrap=True)
    table.add_column("CPU min\na seed", justify="right")
    table.add_column("what it is; the data it needs")
    for name in cell_names():
        cell, _ = read_cell(name)
        assert cell.paper is not None
        paper, unit = cell.paper, MEASURES[cell.paper.accuracy].unit
        value = f"{points(paper.value, paper.deviation, unit)} {unit}"
        what = "; ".join((paper.table, *paper.scaled))
        table.add_row(name, value, f"{paper.cpu_minutes:g}", escape(f"{what}\n{cell.data.source}"))
    console.print(table)
    console.print("data: a folder of original files, here, in $FLEETUNE_DATA, or given with --data FOLDER")


def play_cell(
    name: str,
    *,
    seeds: int,
    changes: Sequence[str],
    data: str | None,
    runs: Path,
    workers: int,
    fresh: bool,
    console: Console,
    cluster: str | None = None,
) -> Outcome:
    """Play the seeds that are not finished yet; show and keep the paper's number beside ours.

    A run as the file has it is kept in RUNS/paper/NAME, one with changes in a folder named after these.
    `cluster`: see `compare.cells.play_all`.

    Raises:
        SettingError, DataError: the cell, a change or the data is wrong; nothing was played.
        FleetuneError: seeds could not be played; the result is of the others.
        KeyboardInterrupt: interrupted; the result is of what is finished.
    """
    cell, asked = read_cell(name, changes, data)
    command = _command(name, seeds, changes, data)
    return play_read(
        Path(name).stem,
        cell,
        asked,
        command,
        seeds=seeds,
        runs=runs,
        workers=workers,
        fresh=fresh,
        console=console,
        cluster=cluster,
    )


def play_read(
    name: str,
    cell: RunSettings,
    asked: RunSettings,
    command: str,
    *,
    seeds: int,
    runs: Path,
    workers: int,
    fresh: bool,
    console: Console,
    cluster: str | None = None,
) -> Outcome:
    """The same of a cell that was read: as its file has it, and as asked for by `command`."""
    if seeds < 1:
        raise SettingError(f"--seeds {seeds}: at least 1")
    assert cell.paper is not None
    counted = MEASURES[cell.paper.accuracy].counted
    label = label_of(cell, asked, cell.paper.samples if counted else _check(asked))
    folder = runs / "paper" / _folder(name, label)
    if counted:
        of = {
            seed: count_traffic(_seeded(asked, seed))
            for seed in range(asked.run.seed, asked.run.seed + seeds)
        }
        return _told(Outcome(name, cell.paper, label, [], of), folder, command, asked, console)
    to_play = runs_of(asked, folder, runs, seeds)
    stopped = _play_missing(to_play, workers=workers, fresh=fresh, console=console, cluster=cluster)
    done = [run for one in to_play if (run := finished(one))]
    outcome = Outcome(name, cell.paper, label, done)
    if done:
        _told(outcome, folder, command, asked, console)
    if stopped:
        console.print(f"stopped: {len(done)} of {seeds} seeds are finished; {again(fresh=fresh)}")
        raise stopped
    return outcome


def kept_of(name: str, cell: RunSettings, asked: RunSettings, runs: Path, seeds: int) -> Outcome | None:
    """What finished runs of a cell came to; None: there is none. Nothing is played, and no data is read: the
    source counts as the one that the paper has.
    """
    assert cell.paper is not None
    if MEASURES[cell.paper.accuracy].counted:
        return None
    label = label_of(cell, asked, cell.paper.samples)
    kept = [
        run
        for one in runs_of(asked, runs / "paper" / _folder(name, label), runs, seeds)
        if (run := finished(one))
    ]
    return Outcome(name, cell.paper, label, kept) if kept else None


def runs_of(asked: RunSettings, folder: Path, runs: Path, seeds: int) -> list[Cell]:
    """A cell's runs, one a seed."""
    return [
        Cell(f"seed {seed}", _seeded(asked, seed), folder / f"seed-{seed}", runs)
        for seed in range(asked.run.seed, asked.run.seed + seeds)
    ]


def play_cells(
    pattern: str,
    *,
    changes: Sequence[str] = (),
    seeds: int,
    runs: Path,
    workers: int,
    fresh: bool,
    console: Console,
    cluster: str | None = None,
) -> None:
    """Play every cell that a pattern fits (`all`: every one), the cheapest first; one whose data is not here
    is passed over with a line. In the end all outcomes stand in one table, RUNS/paper/cells.md.

    Raises:
        SettingError: nothing fits.
        KeyboardInterrupt: interrupted; the same command goes on.
    """
    names = cell_names("*" if pattern == ALL else pattern)
    if not names:
        raise SettingError(f"no cell fits {pattern!r}; known: {', '.join(cell_names())}")
    outcomes: list[Outcome] = []
    for name in sorted(names, key=_cpu_minutes):
        console.print(f"{name}:")
        try:
            options = {"seeds": seeds, "workers": workers, "fresh": fresh, "cluster": cluster}
            outcomes.append(
                play_cell(name, changes=changes, data=None, runs=runs, console=console, **options)  # type: ignore[arg-type]
            )
        except FleetuneError as problem:
            console.print(f"{name}: passed over: {problem}")
    if outcomes:
        lines = ["| cell | of | paper | ours | label |", "|---|---|--:|--:|---|"]
        lines += [f"| {' | '.join(_line(one))} |" for one in outcomes]
        write_atomically(
            runs / "paper" / "cells.md", "\n".join([*lines, ""]).encode(), durable=False, mode=None
        )
        console.print(f"  {runs / 'paper' / 'cells.md'}", soft_wrap=True)


def _cpu_minutes(name: str) -> float:
    cell, _ = read_cell(name)
    assert cell.paper is not None
    return cell.paper.cpu_minutes


def _line(outcome: Outcome) -> tuple[str, ...]:
    paper, found, unit = outcome.paper, outcome.ours, MEASURES[outcome.paper.accuracy].unit
    theirs = f"{points(paper.value, paper.deviation, unit)} {unit}"
    ours = f"{points(found.mean, found.deviation, unit)} {unit}" if found else UNKNOWN
    return outcome.name, paper.table, theirs, ours, str(outcome.label)


def _seeded(settings: RunSettings, seed: int) -> RunSettings:
    if settings.run.is_open:
        raise SettingError('run.rounds = "open": a cell of a paper has a number of rounds')
    method = with_defaults_of_run(settings.method, settings.run.last_round)
    training = with_schedule_of_run(settings.training, settings.run.last_round)
    run = replace(settings.run, seed=seed)
    return replace(settings, run=run, method=method, training=training, paper=None)


def _told(outcome: Outcome, folder: Path, command: str, settings: RunSettings, console: Console) -> Outcome:
    """Keep it and show it."""
    _keep(outcome, folder, command, settings)
    console.print(table_of(outcome))
    console.print(f"  {folder / 'result.json'}", soft_wrap=True)
    return outcome


def _check(settings: RunSettings) -> int:
    """Make model and method and deal the data once, so that a mistake is found at once; number of samples."""
    from fleetune.coordinator.run.models import find_model
    from fleetune.tools.simulator.runner import with_model_shape
    from fleetune.tools.simulator.simulated_fleet import PartitionedData

    try:
        shares = PartitionedData(settings)
    except DataError as problem:
        raise DataError(f"{problem}; or name the original files' folder with --data FOLDER") from None
    spec = find_model(with_model_shape(settings, shares)).spec
    from_section(settings.method, spec)
    shares.of(0, spec)
    return len(shares.dataset.y)


def _folder(name: str, label: Label) -> str:
    return re.sub(r"[^A-Za-z0-9_.=,-]+", "-", ",".join((name, *label.changes)))[:120]


def _play_missing(
    cells: Sequence[Cell], *, workers: int, fresh: bool, console: Console, cluster: str | None
) -> FleetuneError | KeyboardInterrupt | None:
    """What ended it early, if anything did."""
    missing = [cell for cell in cells if fresh or not finished(cell)]
    for cell in missing:
        forget(cell, fresh=fresh)
    problems: list[str] = []
    with progress_bar(console) as bar:
        tasks = {
            cell.label: bar.add_task(cell.label, total=cell.settings.run.rounds, score="") for cell in missing
        }

        def on_round(news: RoundDone) -> None:
            accuracy = f"accuracy {percent(news.score)}"
            number = min(news.number, news.cell.settings.run.rounds)
            bar.update(tasks[news.cell.label], completed=number, score=accuracy)

        def on_done(cell: Cell, problem: FleetuneError | None) -> None:
            problems.extend([f"{cell.label}: {problem}"] if problem else [])

        try:
            play_all(missing, workers=workers, on_round=on_round, on_done=on_done, cluster=cluster)
        except KeyboardInterrupt:
            return ToldInterrupt()
    return FleetuneError("; ".join(problems)) if problems else None


def _command(name: str, seeds: int, changes: Sequence[str], data: str | None) -> str:
    words = ["edge-sim", "paper", name, "--seeds", str(seeds)]
    words += [word for change in changes for word in ("--set", change)]
    return shlex.join(words + (["--data", data] if data else []))


def _keep(outcome: Outcome, folder: Path, command: str, settings: RunSettings) -> None:
    date = datetime.now(UTC).date().isoformat()
    result: dict[str, Any] = {**outcome.as_dict(), "command": command, "date": date}
    result["settings"] = msgspec.to_builtins(replace(settings, paper=None))
    json = msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
    write_atomically(folder / "result.json", json, durable=False, mode=None)
    write_atomically(
        folder / "result.md", markdown_of(outcome, command, date).encode(), durable=False, mode=None
    )


def table_of(outcome: Outcome) -> Table:
    """For the terminal: the paper's number beside ours, then the other readings of our runs."""
    title = escape(f"{outcome.paper.table}\n{outcome.label}")
    table = Table(title=title, caption=outcome.verdict, title_justify="left", caption_justify="left")
    table.add_column("")
    for title in ("paper", "ours", "seeds"):
        table.add_column(title, justify="right")
    for row in _rows(outcome):
        table.add_row(*row)
    return table


def markdown_of(outcome: Outcome, command: str, date: str) -> str:
    """The same as Markdown, with its origin and what the paper leaves open."""
    lines = [f"# {outcome.paper.table}", "", f"{outcome.label}. {outcome.verdict}.", ""]
    lines += [f"`{command}`, {date}", "", "| | paper | ours | seeds |", "|---|--:|--:|--:|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(outcome)]
    lines += ["", f"The paper: {outcome.paper.meaning}. It leaves open:", ""]
    lines += [f"- `{key}`: {what}" for key, what in outcome.paper.open.items()]
    return "\n".join(lines) + "\n"


def _rows(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """The paper's reading first."""
    rows = []
    for name in measures_beside(outcome.paper.accuracy):
        found, measure, is_papers = outcome.measured(name), MEASURES[name], name == outcome.paper.accuracy
        theirs = points(outcome.paper.value, outcome.paper.deviation, measure.unit) if is_papers else ""
        ours = points(found.mean, found.deviation, measure.unit) if found else UNKNOWN
        about = f"{measure.about}, {measure.unit}"
        rows.append((about, theirs, ours, str(found.count) if found else "0"))
    return rows
