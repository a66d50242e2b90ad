"""A method's figures as a table for the terminal, when a run is over."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.reports import readable
from fleetune.coordinator.reports.internals.section import cells
from fleetune.coordinator.reports.summary import Summary


def internals_table(summary: Summary) -> Table | None:
    """A row a figure: how it began, how it ended, and between what it lay; None: the method tells none."""
    if not summary.inside:
        return None
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, head in enumerate(["inside the method", "at first", "last", "over the run"]):
        table.add_column(head, justify="right" if index else "left", overflow="fold", no_wrap=bool(index))
    for one in summary.inside.values():
        table.add_row(*(Text(readable.printable(cell)) for cell in cells(one)))
    return table
