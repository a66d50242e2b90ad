"""Files and terminal output of a comparison or a sweep."""

import msgspec
from rich.console import RenderableType

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.registry import VALIDATION_MEAN
from fleetune.coordinator.reports.report import NO_PICTURES, can_paint
from fleetune.protocols.files import write_atomically
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare.engine import Execution, Outcome
from fleetune.tools.compare.page import ComparisonPage, write_page
from fleetune.tools.compare.rows import csv_of
from fleetune.tools.compare.tables import comparison_tables, sweep_table

DRAWN = 8  # maximum number of combinations with curves; more cannot be distinguished
_STOPPED = (
    "No pictures, because the comparison was stopped. Repeat the same command: it continues and draws them."
)


def report_comparison(settings: RunSettings, execution: Execution, outcome: Outcome) -> None:
    """Write runs.csv, pictures and report.html of a comparison, and print its tables."""
    _write(settings, execution, outcome)
    _show(execution, comparison_tables(outcome.comparison))


def report_sweep(settings: RunSettings, execution: Execution, outcome: Outcome) -> None:
    """Write runs.csv, pictures and report.html of a sweep, and print the best combinations."""
    comparison = outcome.comparison.ranked
    # an earlier sweep may have varied other settings
    for picture in execution.folder.glob("score-by-*.png"):
        picture.unlink()
    _write(settings, execution, Outcome(comparison, outcome.failed, outcome.stopped))
    _show(execution, sweep_table(comparison))
    samples = "validation" if comparison.ranked_by == VALIDATION_MEAN else "test"
    best = readable.printable(comparison.shown[0].label)
    execution.console.print(f"[bold]{best}[/bold] has the best score on {samples} samples", soft_wrap=True)


def _write(settings: RunSettings, execution: Execution, outcome: Outcome) -> None:
    """Write the files, the pictures and the page. Raises StoreError."""
    comparison, pictures = outcome.comparison, dict[str, bytes]()
    remark = _STOPPED if outcome.stopped else "" if can_paint() else NO_PICTURES
    if not remark:
        from fleetune.coordinator.reports.pictures.theme import png
        from fleetune.tools.compare.plots import draw

        pictures = {name: png(figure) for name, figure in draw(comparison, DRAWN).items()}
        if comparison.keys and len(comparison.shown) > DRAWN:
            remark = f"Curves are of the best {DRAWN} of {len(comparison.shown)} combinations."
    as_text = msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()
    files = {
        "runs.csv": csv_of(comparison.run_rows()),
        **{f"{name}.png": data for name, data in pictures.items()},
        "report.html": write_page(ComparisonPage(comparison, pictures, outcome.failed, as_text, remark)),
    }
    for name, data in files.items():
        write_atomically(execution.folder / name, data, durable=False, mode=None)


def _show(execution: Execution, tables: RenderableType) -> None:
    execution.console.print(tables)
    for name in ("report.html", "runs.csv"):
        execution.console.print(f"  {execution.folder / name}", soft_wrap=True)
