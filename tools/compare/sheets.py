"""Small tables for the terminal and for Markdown, from the same headers and rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Entry:
    """The text of a table cell, and whether the cell is the best of its column."""

    text: str
    best: bool = False


Line = Iterable[str | Entry]


def rich_table(heads: Sequence[str], rows: Iterable[Line], *, texts: int = 1, least: int = 0) -> Table:
    """Return a table for the terminal; the best entry of a column is bold.

    Args:
        heads: headers of the columns.
        rows: rows as long as `heads`.
        texts: number of leading text columns; the others are numbers, aligned right.
        least: minimum width of a column of numbers, in characters.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, head in enumerate(heads):
        if index < texts:
            table.add_column(escape(head), overflow="fold", min_width=max(len(head), least and 16))
        else:
            table.add_column(escape(head), justify="right", no_wrap=True, min_width=least)
    for row in rows:
        table.add_row(*map(_as_text, row))
    return table


def _as_text(cell: str | Entry) -> Text:
    return Text(cell) if isinstance(cell, str) else Text(cell.text, "bold" if cell.best else "")


def markdown_table(heads: Sequence[str], rows: Iterable[Line], *, texts: int = 1) -> list[str]:
    """Return the lines of a Markdown table with each column's best entry in bold; see `rich_table`."""
    rule = "---|" * texts + "--:|" * (len(heads) - texts)
    return [f"| {' | '.join(heads)} |", f"|{rule}", *(f"| {' | '.join(map(_marked, row))} |" for row in rows)]


def _marked(cell: str | Entry) -> str:
    if isinstance(cell, str):
        return cell
    return f"**{cell.text}**" if cell.best else cell.text
