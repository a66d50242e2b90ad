"""edge-sim paper: the cells of tools/papers as runs, kept seed by seed, and their tables."""

import difflib
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

from fleetune.coordinator.reports.readable import UNKNOWN, percent
from fleetune.protocols.errors import DataError, FleetuneError, SettingError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.methods import from_section, with_defaults_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.compare.cells import Cell, RoundDone, finished, forget, play_all
from fleetune.tools.papers.accuracies import MEASURES, Label, Outcome, label_of, points
from fleetune.tools.simulator.show import progress_bar

CELLS = Path(__file__).parent
_FORMATS = ("idx", "cifar", "npz")


def read_cell(
    name: str, changes: Sequence[str] = (), data: str | None = None
) -> tuple[RunSettings, RunSettings]:
    """A cell's settings as its file has them, and as asked for.

    Args:
        name: of a cell of tools/papers, or a path to a file like these.
        changes: section.key=value each.
        data: where the cell's files lie, or another source as in data.source.

    Raises:
        SettingError: there is no such cell, a change is wrong, or makes another paper's cell of it.
    """
    file = Path(name) if name.endswith(".toml") else CELLS / f"{name}.toml"
    if not name.endswith(".toml") and not file.is_file():
        known = cell_names()
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or f'none in {CELLS}'}"
        raise SettingError(f"no cell {name!r}; {hint}")
    cell, asked = read_run(file), read_run(file, changes)
    if cell.paper is None or asked.paper != cell.paper:
        raise SettingError(f"{file}: a cell needs a [paper] table, and --set cannot change it")
    if cell.paper.accuracy not in MEASURES:
        raise SettingError(
            f"{file}: paper.accuracy: {cell.paper.accuracy!r} is none of {', '.join(MEASURES)}"
        )
    if asked.method["name"] != cell.method["name"]:
        raise SettingError(
            f"method.name: this cell is {cell.method['name']}'s; else: edge-sim compare {file} --methods ..."
        )
    if data is not None:
        kind = cell.data.source.partition(":")[0]
        source = data if data.partition(":")[0] in _FORMATS else f"{kind}:{data}"
        asked = replace(asked, data=replace(asked.data, source=source))
    return cell, asked


def cell_names() -> list[str]:
    """Of tools/papers."""
    return sorted(file.stem for file in CELLS.glob("*.toml"))


def list_cells(console: Console) -> None:
    """Show what there is and what it needs."""
    table = Table(box=None, pad_edge=False)
    table.add_column("cell", no_wrap=True)
    table.add_column("paper, %", no_wrap=True)
    table.add_column("CPU min\na seed", justify="right")
    table.add_column("what it is; the data it needs")
    for name in cell_names():
        cell, _ = read_cell(name)
        assert cell.paper is not None
        paper, value = cell.paper, points(cell.paper.value, cell.paper.deviation)
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
) -> Outcome:
    """Play the seeds that are not finished yet; show and keep the paper's number beside ours.

    A run as the file has it is kept in RUNS/paper/NAME, one with changes in a folder named after these.

    Raises:
        SettingError, DataError: the cell, a change or the data is wrong; nothing was played.
        FleetuneError: seeds could not be played; the result is of the others.
        KeyboardInterrupt: interrupted; the result is of what is finished.
    """
    if seeds < 1:
        raise SettingError(f"--seeds {seeds}: at least 1")
    cell, asked = read_cell(name, changes, data)
    assert cell.paper is not None
    label = label_of(cell, asked, _check(asked))
    folder = runs / "paper" / _folder(Path(name).stem, label)
    method = with_defaults_of_run(asked.method, asked.run.rounds)
    to_play = [
        Cell(
            f"seed {seed}",
            replace(asked, run=replace(asked.run, seed=seed), method=method, paper=None),
            folder / f"seed-{seed}",
            runs,
        )
        for seed in range(asked.run.seed, asked.run.seed + seeds)
    ]
    stopped = _play_missing(to_play, workers=workers, fresh=fresh, console=console)
    done = [run for one in to_play if (run := finished(one))]
    outcome = Outcome(Path(name).stem, cell.paper, label, done)
    if done:
        _keep(outcome, folder, _command(name, seeds, changes, data), asked)
        console.print(table_of(outcome))
        console.print(f"  {folder / 'result.json'}", soft_wrap=True)
    if stopped:
        console.print(f"{len(done)} of {seeds} seeds are finished; the same command goes on")
        raise stopped
    return outcome


def _check(settings: RunSettings) -> int:
    """Make model and method and deal the data once, so that a mistake is found at once; number of samples."""
    from fleetune.coordinator.run.models import find_model
    from fleetune.tools.simulator.runner import with_model_shape
    from fleetune.tools.simulator.simulated_fleet import Shares

    try:
        shares = Shares(settings)
    except DataError as problem:
        raise DataError(f"{problem}; or name the original files' folder with --data FOLDER") from None
    spec = find_model(with_model_shape(settings, shares)).spec
    from_section(settings.method, spec)
    shares.of(0, spec)
    return len(shares.dataset.y)


def _folder(name: str, label: Label) -> str:
    return re.sub(r"[^A-Za-z0-9_.=,-]+", "-", ",".join((name, *label.changes)))[:120]


def _play_missing(
    cells: Sequence[Cell], *, workers: int, fresh: bool, console: Console
) -> FleetuneError | KeyboardInterrupt | None:
    """What ended it early, if anything did."""
    missing = [cell for cell in cells if fresh or not finished(cell)]
    for cell in missing:
        forget(cell)
    problems: list[str] = []
    with progress_bar(console) as bar:
        tasks = {
            cell.label: bar.add_task(cell.label, total=cell.settings.run.rounds, accuracy="")
            for cell in missing
        }

        def on_round(news: RoundDone) -> None:
            accuracy = f"accuracy {percent(news.accuracy)}"
            number = min(news.number, news.cell.settings.run.rounds)
            bar.update(tasks[news.cell.label], completed=number, accuracy=accuracy)

        def on_done(cell: Cell, problem: FleetuneError | None) -> None:
            problems.extend([f"{cell.label}: {problem}"] if problem else [])

        try:
            play_all(
                missing,
                workers=workers,
                on_round=on_round,
                on_done=on_done,
                on_stopping=lambda: console.print("stopping after the rounds that are being played"),
            )
        except (KeyboardInterrupt, FleetuneError) as stopped:
            return stopped
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
    write_atomically(folder / "result.json", json, durable=False)
    write_atomically(folder / "result.md", markdown_of(outcome, command, date).encode(), durable=False)


def table_of(outcome: Outcome) -> Table:
    """For the terminal: the paper's number beside ours, then the other readings of our runs."""
    title = escape(f"{outcome.paper.table}\n{outcome.label}")
    table = Table(title=title, caption=outcome.verdict, title_justify="left", caption_justify="left")
    table.add_column("accuracy, %")
    for title in ("paper", "ours", "seeds"):
        table.add_column(title, justify="right")
    for row in _rows(outcome):
        table.add_row(*row)
    return table


def markdown_of(outcome: Outcome, command: str, date: str) -> str:
    """The same as Markdown, with its origin and what the paper leaves open."""
    lines = [f"# {outcome.paper.table}", "", f"{outcome.label}. {outcome.verdict}.", ""]
    lines += [f"`{command}`, {date}", "", "| accuracy, % | paper | ours | seeds |", "|---|--:|--:|--:|"]
    lines += [f"| {' | '.join(row)} |" for row in _rows(outcome)]
    lines += ["", f"The paper: {outcome.paper.meaning}. It leaves open:", ""]
    lines += [f"- `{key}`: {what}" for key, what in outcome.paper.open.items()]
    return "\n".join(lines) + "\n"


def _rows(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """The paper's reading first."""
    names = sorted(MEASURES, key=lambda name: name != outcome.paper.accuracy)
    rows = []
    for name in names:
        found, is_papers = outcome.measured(name), name == outcome.paper.accuracy
        theirs = points(outcome.paper.value, outcome.paper.deviation) if is_papers else ""
        ours = points(found.mean, found.deviation) if found else UNKNOWN
        rows.append((MEASURES[name].about, theirs, ours, str(found.count) if found else "0"))
    return rows
