"""Reads rows of a table as options describe them: the one reader of `csv:`, `watch:` and `mqtt:`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets import csv_columns
from fleetune.edge_agent.datasets.csv_columns import Groups, Table, Times
from fleetune.edge_agent.datasets.series_options import SeriesOptions
from fleetune.edge_agent.datasets.source_options import name_list, repeated
from fleetune.edge_agent.datasets.windows import Rows
from fleetune.protocols.errors import DataError
from fleetune.protocols.one_line import flat

FOLDER, FILE = "@folder", "@file"  # columns of a CSV file that it does not have itself


class Converter(Protocol):
    """Converts cells of rows to numbers, shape (n, ...)."""

    def convert(self, rows: csv_columns.Rows) -> NDArray[np.floating]: ...


class RowReader:
    """Converts the rows of a table.

    Args:
        table: the table.
        options: which columns have which role.
        inputs: converts the input.
        label: converts the label; None if there is none.
        groups: numbers of the groups that are known already; new ones are added.
    """

    def __init__(
        self,
        table: Table,
        options: SeriesOptions,
        inputs: Converter,
        label: Converter | None,
        groups: dict[str, int] | None = None,
    ) -> None:
        self._table, self._inputs, self._label = table, inputs, label
        self._time = Times(table, name_list(options.time)) if options.time else None
        self._group = Groups(table, options.group, groups) if options.group else None

    def read(self, rows: csv_columns.Rows) -> tuple[Rows, NDArray[np.int32]]:
        """Return the rows, and the number of each row's group."""
        size = len(rows)
        x = self._inputs.convert(rows).astype(np.float32, copy=False)
        y = np.zeros((size, 0)) if self._label is None else self._label.convert(rows).astype(np.float64)
        time = np.full(size, np.nan) if self._time is None else self._time.convert(rows)
        group = np.zeros(size, np.int32) if self._group is None else self._group.convert(rows)
        refused = np.zeros(size, np.bool_)
        refused[[*self._table.refused]] = True
        return Rows(time, x, y, refused), group


def check_columns(where: str, known: Sequence[str], options: SeriesOptions, roles: dict[str, str]) -> None:
    """Raise DataError if a column in the options does not exist, is listed twice, or is label and input.

    Args:
        where: the source or the file, for messages.
        known: names of the table's columns.
        options: the options.
        roles: further options that name columns, with their values.
    """
    listed = {name: getattr(options, name) for name in ("label", "columns", "group", "time")} | roles
    for option, text in listed.items():
        names = [text] * bool(text) if option in ("group", "test", "validation") else name_list(text)
        if (twice := repeated(names)) is not None:
            raise DataError(f"{where}: {option} lists {twice!r} twice; list each column once")
        for name in names:
            if name not in known:
                shown = flat(", ".join(one for one in known if one not in (FOLDER, FILE)))[:500]
                raise DataError(f"{where}: there is no column {name!r}; the columns are {shown}")
    taken = {} if options.horizon else dict.fromkeys(name_list(options.label), "label")
    taken |= {name: part for part in ("test", "validation") if (name := roles.get(part))}
    inputs = "columns" if options.columns else "text"
    for name in name_list(listed.get(inputs, "")):
        if name in taken:
            raise DataError(
                f"{where}: column {name} is the {taken[name]} and also an input, so a model would only copy"
                f" it: take it out of {inputs}"
            )


def input_names(where: str, known: Sequence[str], options: SeriesOptions, others: set[str]) -> list[str]:
    """Return the names of the input columns. With a horizon, the forecast columns are inputs too.

    Args:
        where: the source or the file, for messages.
        known: names of the table's columns.
        options: the options.
        others: further columns that are no inputs.
    """
    labels = [] if options.horizon else name_list(options.label)
    used = {*labels, *name_list(options.time), options.group, FOLDER, FILE, *others}
    found = name_list(options.columns) or [name for name in known if name not in used]
    if not found:
        raise DataError(f"{where}: no column is left for the input; name the input with columns=")
    return found


def with_places(path: Path, cells: list[str]) -> list[str]:
    """Return a row with the names of the file and of its folder as further cells."""
    return [*cells, path.parent.name, path.name.partition(".")[0]]
