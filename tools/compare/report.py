"""Writes the files of a comparison or a sweep, and prints its tables on the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from rich.console import RenderableType

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import Metric, unit_of
from fleetune.coordinator.metrics.registry import (
    BEFORE_MEAN,
    PERSONAL_MEAN,
    PERSONAL_WORST_DECILE,
    VALIDATION_MEAN,
)
from fleetune.coordinator.reports.html import (
    Html,
    card,
    cards,
    cell,
    document,
    element,
    figure,
    figures,
    note,
    row,
    table,
)
from fleetune.coordinator.reports.page import in_words_of
from fleetune.coordinator.reports.report import NO_PICTURES, can_paint
from fleetune.protocols.files import write_atomically
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.tools.compare.columns import (
    BYTES_UP_TO_TARGET,
    SECONDS_TO_TARGET,
    TO_TARGET,
    accuracies,
    costs,
    diagnostics,
)
from fleetune.tools.compare.comparison import Comparison
from fleetune.tools.compare.engine import Execution, Outcome
from fleetune.tools.compare.rows import csv_of
from fleetune.tools.compare.tables import (
    DIFFERENCES,
    about_seeds,
    best,
    comparison_tables,
    differences,
    entries,
    sweep_table,
    title_of,
    warnings,
)

DRAWN = 8  # maximum number of combinations with curves; more cannot be distinguished
_STOPPED = (
    "No pictures, because the comparison was stopped. Repeat the same command: it continues and draws them."
)
_ABOUT_ACCURACY = (
    "In percent, on the devices' own test samples. The scores are of each device's personal model after its "
    "last round: the mean over devices, the mean weighted by training samples, and the score that nine "
    "in ten devices reach (worst decile). Best round: the highest mean of the fleet. Before, after: the "
    "final evaluation, one more round on a copy of every device, before and after its local training."
)
_ABOUT_COST = (
    "Bytes are the payload of all devices; time is simulated. The file runs.csv next to this page has all "
    "figures."
)
_ABOUT_TARGET = (
    "Counted until the fleet's personal accuracy first reached it; the mean is over the seeds that did."
)
_OVER_TIME = (
    "Every device that has taken part counts with its latest reply, so the curve is the fleet's accuracy "
    "even if few devices take part in a round."
)
_CAPTIONS = {
    "accuracy-by-round": f"Personal models, after local training. {_OVER_TIME}",
    "accuracy-by-uplink": "Personal accuracy against the bytes that all devices had sent. Dotted: the end of "
    "a method that sends no model.",
    "accuracy-by-time": "Personal accuracy against simulated time: training on the boards, bytes on the "
    "links.",
    "accuracy-by-device": "Each device's personal model on its own test samples, all seeds together, the "
    "worst device first. At the right: the median over devices.",
}
_OF_A_SETTING = (
    "Grey: each combination with that value, mean over seeds. Line: the best of each value, whatever the "
    "other settings are."
)
_ABOUT_DIAGNOSTICS = (
    "Diagnostics that the methods report. A figure of updates is the mean over the run, a figure of the "
    "coordinator's state is the last one, a figure of parts is their mean."
)
_BAND = " A band around a curve: standard deviation over seeds."


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


@dataclass(frozen=True)
class ComparisonPage:
    """The content of a comparison's report.html.

    Attributes:
        comparison: the results.
        pictures: plots as PNG files, by name.
        failed: one line for each failed run.
        settings: settings of the run file, as text.
        remark: one line about the plots, or in place of the plots; "" for none.
    """

    comparison: Comparison
    pictures: Mapping[str, bytes]
    failed: Sequence[str]
    settings: str
    remark: str = ""


def write_page(page: ComparisonPage) -> bytes:
    """Return the page as UTF-8; markup in names is escaped."""
    comparison = page.comparison
    sections = [
        element("h1", comparison.name),
        note(_what_ran(comparison)),
        *(element("p", line, class_="bad") for line in page.failed),
        _headline(comparison),
        element("h2", "Accuracy"),
        _metrics_table(comparison, accuracies(comparison.runs)),
        note(in_words_of(comparison.score, _ABOUT_ACCURACY)),
        element("h2", "Cost of the whole run"),
        _metrics_table(comparison, costs(comparison.runs)),
        note(_ABOUT_COST),
        *(element("p", line, class_="bad") for line in warnings(comparison)),
        *_differences(comparison),
        *_target(comparison),
        element("h2", "Plots"),
        *([element("p", page.remark)] if page.remark else []),
        *([_plots(page)] if page.pictures else []),
        *_diagnostics(comparison),
        element("h2", "Settings"),
        _options(comparison),
        element("p"),
        element("pre", page.settings),
    ]
    return document(f"{comparison.name}: {len(comparison.shown)} {comparison.each}s", sections)


def _what_ran(comparison: Comparison) -> str:
    shown = f"{len(comparison.shown)} {comparison.each}s compared, {about_seeds(comparison)} · "
    if not comparison.runs:
        return f"{shown}nothing is finished yet"
    one = comparison.runs[0].summary
    return (
        f"{shown}{one.model} ({one.parameters:,} parameters) · {one.devices} devices · "
        "simulated: real training and real bytes on a virtual clock"
    )


def _headline(comparison: Comparison) -> Html:
    """Return cards with the best configuration by some metrics."""
    shown = []
    for metric, name in (
        (PERSONAL_MEAN, "Best mean, last round"),
        (PERSONAL_WORST_DECILE, "Best worst decile"),
        (BEFORE_MEAN, "Best before training"),
        (BYTES_UP_TO_TARGET, "Fewest bytes to target"),
        (SECONDS_TO_TARGET, "Soonest at target"),
    ):
        winners = [c.label for c in comparison.shown if c.label in best(comparison, metric)]
        found = comparison.spread(winners[0], metric) if winners else None
        if found:
            unit = metric.for_score(comparison.score).unit
            shown.append(card(name, ", ".join(winners), unit.spread(found.mean, found.deviation)))
    return cards(shown)


def _metrics_table(comparison: Comparison, metrics: Sequence[Metric]) -> Html:
    rows = []
    for one in comparison.shown:
        shown = entries(comparison, one, metrics)
        values = [cell(entry.text, "best" if entry.best else "") for entry in shown]
        rows.append(row([title_of(comparison, one), *values]))
    return table([comparison.each, *(metric.head for metric in metrics)], rows)


def _target(comparison: Comparison) -> list[Html]:
    target = comparison.target
    if not target:
        return []
    return [
        element("h2", f"Cost of {unit_of(comparison.score).text(target.score)}"),
        _metrics_table(comparison, TO_TARGET),
        note(f"The target is {target.reason}. {_ABOUT_TARGET}"),
    ]


def _differences(comparison: Comparison) -> list[Html]:
    """Return a table of each variant's score minus that of the unchanged method; empty without variants."""
    rows = differences(comparison)
    if not rows:
        return []
    heads = ["variant", "minus", *(metric.head for metric in DIFFERENCES)]
    about = note("Variant minus the unchanged method, paired by seed; of a share in percentage points.")
    return [element("h2", "Differences"), table(heads, map(row, rows), left=["minus"]), about]


def _plots(page: ComparisonPage) -> Html:
    band = _BAND if len(page.comparison.seeds) > 1 else ""
    return figures(
        figure(png, in_words_of(page.comparison.score, _CAPTIONS.get(name, _OF_A_SETTING)) + band)
        for name, png in page.pictures.items()
    )


def _diagnostics(comparison: Comparison) -> list[Html]:
    """Return tables of the methods' diagnostics: one row for each configuration and diagnostic."""
    rows = []
    for one in comparison.shown:
        for metric in diagnostics(comparison.of(one.label)):
            found = comparison.spread(one.label, metric)
            if found:
                value = metric.unit.spread(found.mean, found.deviation)
                title, about = cell(metric.title, "text"), cell(metric.about, "text")
                rows.append(row([one.label, title, value, about]))
    heads = ["method", "figure", "value", "what it is"]
    about = note(_ABOUT_DIAGNOSTICS)
    shown = table(heads, rows, left=["figure", "what it is"])
    return [element("h2", "Diagnostics of the methods"), about, shown] if rows else []


def _options(comparison: Comparison) -> Html:
    rows = [
        row(
            [
                one.label,
                cell(str(one.method["name"]), "text"),
                cell(one.options or "its defaults", "text"),
            ]
        )
        for one in comparison.configurations
    ]
    return table(["in the tables", "method", "settings"], rows, left=["method", "settings"])
