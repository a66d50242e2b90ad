"""Files and terminal output of a comparison or a sweep."""

import msgspec
from rich.console import RenderableType

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.registry import VALIDATION_MEAN
from fleetune.coordinator.reports.html import Plot
from fleetune.coordinator.reports.report import NO_PICTURES, can_paint, paint
from fleetune.protocols.files import write_atomically
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare.columns import diagnostics
from fleetune.tools.compare.engine import Execution, Outcome
from fleetune.tools.compare.page import ComparisonPage, write_page
from fleetune.tools.compare.rows import csv_of
from fleetune.tools.compare.sweep_axes import Axes, Range
from fleetune.tools.compare.tables import comparison_tables, markdown, sweep_summary, sweep_table

DRAWN = 8  # maximum number of combinations with curves; more cannot be distinguished
_STOPPED = "No pictures, because the comparison was stopped: the same command goes on, and makes them."


def report_comparison(settings: RunSettings, execution: Execution, outcome: Outcome) -> None:
    """Write tables, pictures and report.html of a comparison, and print the tables."""
    comparison = outcome.comparison
    files = {
        "methods.csv": csv_of(comparison.mean_rows()),
        "methods.md": markdown(comparison),
        "runs.csv": csv_of(comparison.run_rows()),
        "rounds.csv": csv_of(comparison.round_rows()),
    }
    if diagnostics(comparison.runs):
        files["diagnostics.csv"] = csv_of(comparison.diagnostics_rows())
    _leave(files, settings, execution, outcome)
    _show(execution, comparison_tables(comparison), "report.html", *files)


def report_sweep(settings: RunSettings, axes: Axes, execution: Execution, outcome: Outcome) -> None:
    """Write tables, summary.json, pictures and report.html of a sweep, and print the best combinations."""
    comparison = outcome.comparison.ranked
    over = {axis.key: axis.words if isinstance(axis, Range) else axis.values for axis in axes}
    files = {
        "sweep.csv": csv_of(comparison.mean_rows()),
        "runs.csv": csv_of(comparison.run_rows()),
        "rounds.csv": csv_of(comparison.round_rows()),
        "summary.json": sweep_summary(comparison, over, outcome.failed),
    }
    # an earlier sweep may have varied other settings
    for picture in execution.folder.glob("score-by-*.png"):
        picture.unlink()
    _leave(files, settings, execution, Outcome(comparison, outcome.failed, outcome.stopped))
    _show(execution, sweep_table(comparison), "report.html", "sweep.csv", "summary.json")
    samples = "validation" if comparison.ranked_by == VALIDATION_MEAN else "test"
    best = readable.printable(comparison.shown[0].label)
    execution.console.print(f"[bold]{best}[/bold] does best on {samples} samples", soft_wrap=True)


def _leave(files: dict[str, bytes], settings: RunSettings, execution: Execution, outcome: Outcome) -> None:
    """Write the files, the pictures and the page. Raises StoreError."""
    comparison, pictures = outcome.comparison, dict[str, bytes]()
    plots: list[Plot] = []
    remark = _STOPPED if outcome.stopped else "" if can_paint() else NO_PICTURES
    if not remark:
        from fleetune.tools.compare.plots import draw

        plots, pictures = paint(lambda theme: draw(comparison, theme, DRAWN))
        if comparison.keys and len(comparison.shown) > DRAWN:
            remark = f"Curves are of the best {DRAWN} of {len(comparison.shown)} combinations."
    as_text = msgspec.json.format(msgspec.json.encode(settings), indent=2).decode()
    page = write_page(ComparisonPage(comparison, plots, outcome.failed, as_text, remark))
    for name, data in {**files, **pictures, "report.html": page}.items():
        write_atomically(execution.folder / name, data, durable=False, mode=None)


def _show(execution: Execution, tables: RenderableType, *files: str) -> None:
    execution.console.print(tables)
    for name in files:
        execution.console.print(f"  {execution.folder / name}", soft_wrap=True)
