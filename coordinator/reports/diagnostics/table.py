"""A method's figures as a table for the terminal, when a run is over."""

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.summary import Summary
from fleetune.coordinator.reports.diagnostics.section import cells


def diagnostics_table(summary: Summary) -> Table | None:
    """A row a figure: how it began, how it ended, and between what it lay; None: the method tells none."""
    if not summary.diagnostics_by_name:
        return None
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for index, head in enumerate(["diagnostics of the method", "at first", "last", "over the run"]):
        table.add_column(head, justify="right" if index else "left", overflow="fold", no_wrap=bool(index))
    for one in summary.diagnostics_by_name.values():
        table.add_row(*(Text(readable.printable(cell)) for cell in cells(one)))
    return table
