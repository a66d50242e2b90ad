"""edge-sim table: a whole table of a paper by one command, the paper's number beside ours in each cell."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fleetune.coordinator.metrics.readable import UNKNOWN
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.files import write_atomically
from fleetune.tools.papers.cells import kept_of, play_read
from fleetune.tools.papers.measures import MEASURES, Outcome, points
from fleetune.tools.papers.table_files import (
    PaperTable,
    TableCell,
    cells_of_table,
    read_table,
    table_names,
)

SCALED = "*"  # behind a number of ours that is of a smaller run than the paper's


@dataclass(frozen=True)
class Filled:
    """A cell of a table, and our number for it; or why there is none."""

    cell: TableCell
    outcome: Outcome | None
    why: str = ""

    @property
    def theirs(self) -> str:
        """As the paper prints it."""
        printed = self.cell.printed
        if isinstance(printed, str):
            return printed
        mean, *deviation = printed if isinstance(printed, tuple) else (printed,)
        return f"{mean:.2f}" + (f" ± {deviation[0]:.2f}" if deviation else "")

    @property
    def ours(self) -> str:
        """Mean and deviation over seeds, and how many if there is but one."""
        found = self.outcome.ours if self.outcome else None
        if found is None or self.outcome is None:
            return UNKNOWN
        unit = MEASURES[self.outcome.paper.accuracy].unit
        scaled = SCALED if self.outcome.label.scaled else ""
        return points(found.mean, found.deviation, unit) + scaled


@dataclass(frozen=True)
class Asked:
    """How a table is to be filled.

    Attributes:
        seeds: runs of each cell.
        changes: section.key=value each, on top of every cell: then all are scaled.
        runs: where runs are kept.
        workers, fresh: as of `play_read`.
        show: nothing is played; what is kept is shown.
        cluster: see `compare.cells.play_all`.
    """

    seeds: int
    changes: Sequence[str]
    runs: Path
    workers: int
    fresh: bool
    show: bool
    cluster: str | None = None


def list_tables(console: Console) -> None:
    """Show which there are, and how much of each can be played."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("table", no_wrap=True)
    shown.add_column("cells", justify="right")
    shown.add_column("can be played", justify="right")
    shown.add_column("CPU hours\na seed", justify="right")
    shown.add_column("what it is")
    for name in table_names():
        table = read_table(name)
        cells = cells_of_table(name, table)
        there = [cell for cell in cells if not cell.lacks]
        hours = sum(_cpu_minutes(cell) for cell in there) / 60
        shown.add_row(name, str(len(cells)), str(len(there)), f"{hours:.1f}", escape(table.title))
    console.print(shown)
    console.print(
        "a cell whose data is not here is passed over: $FLEETUNE_DATA is the folder of data folders"
    )


def fill_table(name: str, asked: Asked, console: Console) -> None:
    """Play every cell that can be, the cheapest first, and what is not finished yet; leave the table as
    RUNS/paper/table-NAME.md and .json, and show it. It is written anew after each cell.

    Raises:
        SettingError: there is no such table, or a change is wrong; nothing was played.
        KeyboardInterrupt: interrupted; the table has what is finished.
    """
    if asked.seeds < 1:
        raise SettingError(f"--seeds {asked.seeds}: at least 1")
    table = read_table(name)
    cells = cells_of_table(name, table)
    for cell in cells:
        if not cell.lacks:
            cell.read(asked.changes)
    found = {(cell.method, cell.setting): Filled(cell, None, cell.lacks) for cell in cells}
    there = sorted((cell for cell in cells if not cell.lacks), key=_cpu_minutes)
    try:
        for cell in there:
            found[cell.method, cell.setting] = Filled(cell, *_filled(cell, asked, console, show=True))
        for cell in [] if asked.show else there:
            console.print(f"{cell.name}: {cell.method}, {cell.setting}", soft_wrap=True)
            found[cell.method, cell.setting] = Filled(cell, *_filled(cell, asked, console, show=False))
            _keep(name, table, found, asked)
    finally:
        _keep(name, table, found, asked)
        _show(name, table, found, asked, console)


def _filled(cell: TableCell, asked: Asked, console: Console, *, show: bool) -> tuple[Outcome | None, str]:
    plain, changed = cell.read(asked.changes)
    command = _command("paper" if not cell.own else "table", cell.name, asked)
    try:
        if show:
            outcome = kept_of(cell.name, plain, changed, asked.runs, asked.seeds)
            return outcome, "" if outcome else "not played yet"
        outcome = play_read(
            cell.name,
            plain,
            changed,
            command,
            seeds=asked.seeds,
            runs=asked.runs,
            workers=asked.workers,
            fresh=asked.fresh,
            console=console,
            cluster=asked.cluster,
        )
    except FleetuneError as problem:
        if not show:
            console.print(f"{cell.name}: passed over: {problem}", soft_wrap=True)
        return None, str(problem)
    return outcome, ""


def _cpu_minutes(cell: TableCell) -> float:
    paper = cell.read()[0].paper
    assert paper is not None
    return paper.cpu_minutes


def _command(kind: str, name: str, asked: Asked) -> str:
    words = ["edge-sim", kind, name, "--seeds", str(asked.seeds)]
    return shlex.join([*words, *(word for change in asked.changes for word in ("--set", change))])


Found = Mapping[tuple[str, str], Filled]


def _keep(name: str, table: PaperTable, found: Found, asked: Asked) -> None:
    command = _command("table", name, asked)
    content = {
        "table": name,
        "title": table.title,
        "command": command,
        "cells": [_as_dict(one) for one in found.values()],
    }
    json = msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
    folder = asked.runs / "paper"
    write_atomically(folder / f"table-{name}.json", json, durable=False, mode=None)
    write_atomically(
        folder / f"table-{name}.md", markdown_of(table, found, command).encode(), durable=False, mode=None
    )


def _as_dict(one: Filled) -> dict[str, Any]:
    ours = one.outcome.ours if one.outcome else None
    return {
        "method": one.cell.method,
        "setting": one.cell.setting,
        "cell": one.cell.name,
        "paper": one.cell.printed,
        "ours": {"mean": ours.mean, "deviation": ours.deviation, "seeds": ours.count} if ours else None,
        "label": str(one.outcome.label) if one.outcome else None,
        "verdict": one.outcome.verdict if one.outcome else None,
        "why": one.why or None,
    }


def markdown_of(table: PaperTable, found: Found, command: str) -> str:
    """The table as Markdown: the paper's number / ours, and below it why cells are empty."""
    columns, rows = _axes(table)
    lines = [f"# {table.title}", "", f"The paper's number / ours. `{command}`", ""]
    lines += [f"| | {' | '.join(columns)} |", f"|---|{'--:|' * len(columns)}"]
    lines += [
        f"| {row} | {' | '.join(_text(table, found, row, column) for column in columns)} |" for row in rows
    ]
    return "\n".join([*lines, "", *(f"- {line}" for line in _notes(found)), ""])


def _show(name: str, table: PaperTable, found: Found, asked: Asked, console: Console) -> None:
    columns, rows = _axes(table)
    shown = Table(title=escape(f"{table.title}\nthe paper's number, below it ours"), title_justify="left")
    shown.add_column("")
    for column in columns:
        shown.add_column(escape(column), justify="right")
    for row in rows:
        cells = [_text(table, found, row, column, "\n") for column in columns]
        shown.add_row(escape(row), *map(escape, cells))
    console.print(shown)
    for line in _notes(found):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"  {asked.runs / 'paper' / f'table-{name}.md'}", soft_wrap=True)


def _axes(table: PaperTable) -> tuple[list[str], list[str]]:
    """What stands across, and what down."""
    methods, settings = list(table.methods), list(table.settings)
    return (methods, settings) if table.across == "methods" else (settings, methods)


def _text(table: PaperTable, found: Found, row: str, column: str, between: str = " / ") -> str:
    one = found.get((column, row) if table.across == "methods" else (row, column))
    return f"{one.theirs}{between}{one.ours}" if one else ""


def _notes(found: Found) -> list[str]:
    """What a star says, and why cells are empty: each reason once, with the cells that it is of."""
    lines = []
    if any(one.outcome and one.outcome.label.scaled for one in found.values()):
        lines.append(f"{SCALED} a scaled run, which says nothing about the paper's number")
    reasons: dict[str, list[str]] = {}
    for one in found.values():
        if one.why:
            reasons.setdefault(one.why, []).append(f"{one.cell.method}, {one.cell.setting}")
    return lines + [f"{UNKNOWN} {len(cells)} cells: {why} ({_some(cells)})" for why, cells in reasons.items()]


def _some(cells: Sequence[str], most: int = 3) -> str:
    more = f" and {len(cells) - most} more" if len(cells) > most else ""
    return "; ".join(cells[:most]) + more
