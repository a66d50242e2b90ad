"""edge-sim table: run a whole table of a paper, and show the paper's number and ours in each cell."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Table

from fleetune.coordinator.metrics.readable import UNKNOWN
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.files import write_atomically
from fleetune.tools.compare.engine import Execution
from fleetune.tools.compare.sheets import markdown_table
from fleetune.tools.papers.measures import CellResult, paper_of, spread_as_dict
from fleetune.tools.papers.paper import command_line, finished_result, run_cell_settings
from fleetune.tools.papers.table_files import (
    PaperTable,
    TableCell,
    cells_of_table,
    read_table,
    table_names,
)

SCALED = "*"  # marks one of our numbers if its run is smaller than the paper's


@dataclass(frozen=True)
class FilledCell:
    """A cell of a table with our result, or the reason why there is none."""

    cell: TableCell
    result: CellResult | None
    why: str = ""

    @property
    def theirs(self) -> str:
        """The number as the paper prints it."""
        printed = self.cell.printed
        if isinstance(printed, str):
            return printed
        mean, *deviation = printed if isinstance(printed, tuple) else (printed,)
        return f"{mean:.2f}" + (f" ± {deviation[0]:.2f}" if deviation else "")

    @property
    def ours(self) -> str:
        """Mean and deviation over seeds, marked if the runs are scaled."""
        if self.result is None or self.result.ours is None:
            return UNKNOWN
        return self.result.texts[1] + SCALED * bool(self.result.label.scaled)


@dataclass(frozen=True)
class TableRequest:
    """Options for filling a table.

    Attributes:
        seeds: runs of each cell.
        changes: section.key=value each, for every cell; with any, all results are scaled.
        show: True only shows the finished runs and executes nothing.
        execution: how cells are executed; its folder is RUNS/paper.
    """

    seeds: int
    changes: Sequence[str]
    show: bool
    execution: Execution


def list_tables(console: Console) -> None:
    """Show all tables, and how many of their cells can be run."""
    shown = Table(box=None, pad_edge=False)
    shown.add_column("table", no_wrap=True)
    shown.add_column("cells", justify="right")
    shown.add_column("can be run", justify="right")
    shown.add_column("CPU hours\na seed", justify="right")
    shown.add_column("what it is")
    for name in table_names():
        table = read_table(name)
        cells = cells_of_table(name, table)
        possible = [cell for cell in cells if not cell.lacks]
        hours = sum(map(_cpu_minutes, possible)) / 60
        shown.add_row(name, str(len(cells)), str(len(possible)), f"{hours:.1f}", escape(table.title))
    console.print(shown)
    console.print("a cell whose data is not here is skipped: $FLEETUNE_DATA is the folder of data folders")


def fill_table(name: str, request: TableRequest) -> None:
    """Run every possible cell that is not finished, the cheapest first.

    Rewrites RUNS/paper/table-NAME.md and .json after each cell, and shows the table.

    Raises:
        SettingError: there is no such table, or a change is wrong; nothing was executed.
        KeyboardInterrupt: interrupted; the table has the finished cells.
    """
    if request.seeds < 1:
        raise SettingError(f"--seeds {request.seeds}: the number of seeds must be at least 1")
    table = read_table(name)
    cells = cells_of_table(name, table)
    possible = sorted((cell for cell in cells if not cell.lacks), key=_cpu_minutes)
    for cell in possible:
        cell.read(request.changes)
    found = {(cell.method, cell.setting): FilledCell(cell, None, cell.lacks) for cell in cells}
    try:
        for cell in possible:
            found[cell.method, cell.setting] = _finished(cell, request)
        for cell in [] if request.show else possible:
            found[cell.method, cell.setting] = _filled(cell, request)
            _write(name, table, found, request)
    finally:
        _write(name, table, found, request)
        console = request.execution.console
        console.print(Markdown(markdown_of(table, found, _command_of(name, request))))
        console.print(f"  {request.execution.folder / f'table-{name}.md'}", soft_wrap=True)


def _finished(cell: TableCell, request: TableRequest) -> FilledCell:
    try:
        result = finished_result(cell.name, *cell.read(request.changes), request.seeds, request.execution)
    except FleetuneError as problem:
        return FilledCell(cell, None, str(problem))
    return FilledCell(cell, result, "" if result else "not run yet")


def _filled(cell: TableCell, request: TableRequest) -> FilledCell:
    console = request.execution.console
    console.print(f"{cell.name}: {cell.method}, {cell.setting}", soft_wrap=True)
    command = command_line("table" if cell.own else "paper", cell.name, request.seeds, request.changes)
    settings = cell.read(request.changes)
    try:
        return FilledCell(
            cell, run_cell_settings(cell.name, *settings, command, request.seeds, request.execution)
        )
    except FleetuneError as problem:
        console.print(f"{cell.name}: skipped: {problem}", soft_wrap=True)
        return FilledCell(cell, None, str(problem))


def _command_of(name: str, request: TableRequest) -> str:
    return command_line("table", name, request.seeds, request.changes)


def _cpu_minutes(cell: TableCell) -> float:
    return paper_of(cell.read()[0]).cpu_minutes


Found = Mapping[tuple[str, str], FilledCell]


def _write(name: str, table: PaperTable, found: Found, request: TableRequest) -> None:
    command = _command_of(name, request)
    content = {
        "table": name,
        "title": table.title,
        "command": command,
        "cells": [_as_dict(one) for one in found.values()],
    }
    files = {
        "json": msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n",
        "md": markdown_of(table, found, command).encode(),
    }
    for suffix, data in files.items():
        file = request.execution.folder / f"table-{name}.{suffix}"
        write_atomically(file, data, durable=False, mode=None)


def _as_dict(one: FilledCell) -> dict[str, Any]:
    return {
        "method": one.cell.method,
        "setting": one.cell.setting,
        "cell": one.cell.name,
        "paper": one.cell.printed,
        "ours": spread_as_dict(one.result.ours) if one.result else None,
        "label": str(one.result.label) if one.result else None,
        "verdict": one.result.verdict if one.result else None,
        "why": one.why or None,
    }


def markdown_of(table: PaperTable, found: Found, command: str) -> str:
    """Return the table as Markdown: the paper's number / ours, then the reasons for empty cells."""
    methods, settings = list(table.methods), list(table.settings)
    across = table.across == "methods"
    columns, names = (methods, settings) if across else (settings, methods)

    def text(row: str, column: str) -> str:
        one = found.get((column, row) if across else (row, column))
        return f"{one.theirs} / {one.ours}" if one else ""

    rows = [[row, *(text(row, column) for column in columns)] for row in names]
    lines = [f"# {table.title}", "", f"The paper's number / ours. `{command}`", ""]
    lines += [*markdown_table(["", *columns], rows), ""]
    return "\n".join([*lines, *(f"- {line}" for line in _notes(found)), ""])


def _notes(found: Found) -> list[str]:
    """Notes below a table: the meaning of a star, and each reason for empty cells with its cells."""
    lines = []
    if any(one.result and one.result.label.scaled for one in found.values()):
        lines.append(f"{SCALED} a scaled run, which says nothing about the paper's number")
    reasons: dict[str, list[str]] = {}
    for one in found.values():
        if one.why:
            reasons.setdefault(one.why, []).append(f"{one.cell.method}, {one.cell.setting}")
    return lines + [f"{UNKNOWN} {len(cells)} cells: {why} ({_some(cells)})" for why, cells in reasons.items()]


def _some(cells: Sequence[str], most: int = 3) -> str:
    more = f" and {len(cells) - most} more" if len(cells) > most else ""
    return "; ".join(cells[:most]) + more
