"""A comparison as tables for the terminal and the page, and as CSV files."""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import Metric, unit_of
from fleetune.coordinator.metrics.registry import (
    BEFORE_MEAN,
    BYTES_DOWN,
    BYTES_UP,
    PERSONAL_MEAN,
    TOOK_PART,
)
from fleetune.coordinator.metrics.summary import Summary
from fleetune.protocols.tasks.scores import ACCURACY, Score
from fleetune.tools.compare.comparison import Comparison, Contender, Spread
from fleetune.tools.compare.figures import (
    ACCURACIES,
    BEST_AFTER,
    TO_TARGET,
    accuracies,
    costs,
    inside,
    metrics,
)
from fleetune.tools.compare.played import Point

NOT_REACHED = "not reached"
_COSTS_OF_A_PAGE = (BYTES_UP, BYTES_DOWN)
_DIFFERENCES = (PERSONAL_MEAN, BEST_AFTER)


@dataclass(frozen=True)
class Cell:
    """What stands in a table, and whether nobody does better."""

    text: str
    best: bool = False


NOT_ALL = "accuracies are of the devices that took part: not of the same devices for all"


def unequal(comparison: Comparison) -> bool:
    """Whether some contender left out devices that another one served."""
    counts = [comparison.spread(contender.label, TOOK_PART) for contender in comparison.shown]
    return len({found.mean for found in counts if found}) > 1


def alike(comparison: Comparison) -> list[str]:
    """A line for all contenders whose runs came to the same accuracies, to the last bit."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for one in comparison.shown:
        found = [run for run in comparison.figures if run.contender == one.label]
        course = tuple((run.seed, *map(run.of, (PERSONAL_MEAN, BEFORE_MEAN, BEST_AFTER))) for run in found)
        groups.setdefault(course, []).append(one.label)
    return [_same(comparison, labels) for labels in groups.values() if len(labels) > 1]


def _same(comparison: Comparison, labels: Sequence[str]) -> str:
    line = f"{' and '.join(map(readable.printable, labels))} trained alike, to the last bit"
    used = {p for label in labels for run in comparison.of(label) for p in _ratios(run.summary)}
    if used != {1.0}:
        return line
    return (
        f"{line}: every device ran at ratio 1, where a method of submodels, as FedSPU is, is FedAvg. "
        "Deal smaller ones: --set fleet.ratios=[0.2,0.4,0.6,0.8,1.0]"
    )


def _ratios(summary: Summary) -> set[float]:
    return {ratio for used in summary.ratios.values() for ratio in used}


def tables(comparison: Comparison) -> Group:
    """Accuracies, costs and what the target cost, at most 100 columns wide; the best of a column bold."""
    parts: list[RenderableType] = [
        Text(),
        _table(_what(comparison.score), comparison, accuracies(comparison.runs)),
        _note(about_seeds(comparison)),
        _note("mean, weighted by samples, what 9 in 10 devices reach: personal models after the last round"),
        _note("best round: of the whole fleet; before, after: local training in one more round"),
        Text(),
        _table("cost", comparison, costs(comparison.runs)),
        *([_note(NOT_ALL)] if unequal(comparison) else []),
        *(_note(line) for line in alike(comparison)),
    ]
    if comparison.target:
        at = unit_of(comparison.score).text(comparison.target.score)
        parts += [
            Text(),
            _table(f"to {at}", comparison, TO_TARGET),
            _note(f"until personal {comparison.score.title} was {at}: {comparison.target.reason}"),
        ]
    return Group(*parts)


def markdown(comparison: Comparison) -> bytes:
    """What a page of documentation says of it: a row a contender, accuracies in percent; the best bold."""
    scores = accuracies(comparison.runs)
    columns = (*scores, *_COSTS_OF_A_PAGE)
    heads = ["method", "settings", *(metric.head for metric in columns)]
    what = "Accuracy in percent" if comparison.score == ACCURACY else f"By {_what(comparison.score)}"
    lines = [f"{what}; {about_seeds(comparison)}.", ""]
    lines += [f"| {' | '.join(heads)} |", f"|---|---|{'--:|' * len(columns)}"]
    for contender in comparison.shown:
        found = cells(comparison, contender, scores) + cells(comparison, contender, _COSTS_OF_A_PAGE)
        row = [f"**{cell.text}**" if cell.best else cell.text for cell in found]
        lines.append(f"| {' | '.join((title_of(comparison, contender), contender.options, *row))} |")
    return "\n".join([*lines, "", *_differences(comparison)]).encode()


def _differences(comparison: Comparison) -> list[str]:
    """Each variant less the method as it is, seed by seed: both were dealt the same data, so that what the
    seeds have in common drops out. Empty: nobody is a variant of another.
    """
    labels = {one.label for one in comparison.shown}
    lines = []
    for one in comparison.shown:
        whole = str(one.method["name"])
        if one.label != whole and whole in labels:
            found = [comparison.difference(one.label, whole, metric) for metric in _DIFFERENCES]
            row = [_signed(spread, unit_of(comparison.score).on_axis) for spread in found]
            lines.append(f"| {' | '.join((one.label, whole, *row))} |")
    heads = " | ".join(metric.head for metric in _DIFFERENCES)
    points = ", points" if comparison.score.share else ""
    head = [f"Less the method as it is{points}, paired by seed:", "", f"| variant | less | {heads} |"]
    return [*head, f"|---|---|{'--:|' * len(_DIFFERENCES)}", *lines, ""] if lines else []


def _signed(found: Spread | None, times: float) -> str:
    if not found:
        return readable.UNKNOWN
    form = ".1f" if times > 1 else ".3g"
    within = "" if found.deviation is None else f" ±{times * found.deviation:{form}}"
    return f"{times * found.mean:+{form}}{within}"


def _what(score: Score) -> str:
    """What a table of scores is of: accuracy, %."""
    return f"{score.title}, %" if score.share else f"{score.title}, {score.better} is better"


def title_of(comparison: Comparison, contender: Contender) -> str:
    """Its label, and how many of its seeds are there where some are missing."""
    there, asked = len(comparison.of(contender.label)), len(comparison.seeds)
    label = readable.printable(contender.label)
    return label if there == asked else f"{label} ({there} of {asked} seeds)"


def about_seeds(comparison: Comparison) -> str:
    """What stands before and behind ±."""
    seeds = comparison.seeds
    if len(seeds) == 1:
        return f"one run each, seed {seeds[0]}"
    in_line = list(seeds) == list(range(seeds[0], seeds[0] + len(seeds)))
    which = f"{seeds[0]} to {seeds[-1]}" if in_line else ", ".join(map(str, seeds))
    return f"mean ± standard deviation over {len(seeds)} seeds ({which})"


def best(comparison: Comparison, metric: Metric) -> set[str]:
    """The contenders whose mean is the best of the metric, of those where every run has the figure (who
    reached the target with one seed of three is no example). None where there is no rivalry.
    """
    means = {
        contender.label: found.mean
        for contender in comparison.shown
        if (found := comparison.spread(contender.label, metric))
        and found.count == len(comparison.of(contender.label))
    }
    better = metric.for_score(comparison.score).better
    if not better or len(comparison.shown) < 2:
        return set()
    first = (max if better == "higher" else min)(means.values(), default=None)
    return {label for label, value in means.items() if value == first}


def runs_csv(comparison: Comparison) -> bytes:
    """All figures, one row a run; accuracies as fractions, bytes, seconds. Empty: it has none."""
    rows: Iterable[dict[str, object]] = (
        {"contender": one.contender, "method": one.method, "seed": one.seed, **one.values}
        for one in comparison.figures
    )
    return csv_of(["contender", "method", "seed", *(metric.name for metric in _columns(comparison))], rows)


def _columns(comparison: Comparison) -> list[Metric]:
    return [*metrics(), *inside(comparison.runs)]


def methods_csv(comparison: Comparison) -> bytes:
    """One row a contender: of each figure the mean over seeds, the deviation, and how many runs have it."""
    columns = ["contender", "method", "options", "seeds", "target", "target_reason"]
    rows = []
    for contender in comparison.shown:
        row: dict[str, object] = {
            "contender": contender.label,
            "method": contender.method["name"],
            "options": contender.options,
            "seeds": len(comparison.of(contender.label)),
        }
        if comparison.target:
            row.update(target=comparison.target.score, target_reason=comparison.target.reason)
        for metric in _columns(comparison):
            row.update(spread_of(comparison, contender, metric))
        rows.append(row)
    return csv_of([*columns, *(name for one in _columns(comparison) for name in spread_names(one))], rows)


_PARTS = ("mean", "deviation", "count")


def spread_names(metric: Metric) -> list[str]:
    """The columns of `spread_of`."""
    return [f"{metric.name}_{part}" for part in _PARTS]


def spread_of(comparison: Comparison, contender: Contender, metric: Metric) -> dict[str, object]:
    """Of one figure over the contender's seeds."""
    found = comparison.spread(contender.label, metric)
    parts = [getattr(found, part, 0 if part == "count" else None) for part in _PARTS]
    return dict(zip(spread_names(metric), parts, strict=True))


def rounds_csv(comparison: Comparison) -> bytes:
    """What the curves are drawn from: one row a round of a run."""
    rows = (
        {"contender": run.label, "seed": run.seed, **asdict(point)}
        for run in comparison.runs
        for point in run.points
    )
    of_point = (field.name for field in fields(Point))
    return csv_of(["contender", "seed", *of_point], rows)


def diagnostics_csv(comparison: Comparison) -> bytes:
    """What the methods told of their inner workings: one row a figure, a round of a run, and a part."""
    rows = (
        {"contender": run.label, "seed": run.seed, **row}
        for run in comparison.runs
        for row in diagnostic_rows(run.summary)
    )
    return csv_of(["contender", "seed", "number", "figure", "part", "mean", "least", "greatest"], rows)


def diagnostic_rows(summary: Summary) -> Iterator[dict[str, object]]:
    """Of one run: one row a figure, a round, and, behind that, a part."""
    for name, course in summary.diagnostics_by_name.items():
        for at, number in enumerate(course.rounds):
            row = {"number": number, "figure": name}
            ends = {"mean": course.mean[at], "least": course.least[at], "greatest": course.greatest[at]}
            yield {**row, **ends}
            yield from ({**row, "part": part, "mean": one[at]} for part, one in course.parts.items())


def cells(comparison: Comparison, contender: Contender, columns: Sequence[Metric]) -> list[Cell]:
    """The contender's row: each figure over its seeds, and whether it is the best of the column."""
    found = [comparison.spread(contender.label, metric) for metric in columns]
    if columns is TO_TARGET and not found[0]:
        return [Cell(NOT_REACHED), *(Cell(readable.UNKNOWN) for _ in columns[1:])]
    there = len(comparison.of(contender.label))
    return [
        Cell(
            _text(metric.for_score(comparison.score), one, there, columns),
            contender.label in best(comparison, metric),
        )
        for metric, one in zip(columns, found, strict=True)
    ]


def _text(metric: Metric, found: Spread | None, there: int, columns: Sequence[Metric]) -> str:
    """Mean and deviation, and of how many runs if not all have it; a table of accuracies says %."""
    if not found:
        return readable.UNKNOWN
    text = metric.unit.spread(found.mean, found.deviation)
    text = text.removesuffix(f" {metric.unit.sign}") if columns[: len(ACCURACIES)] == ACCURACIES else text
    return text + (f" ({found.count} of {there})" if found.count < there else "")


def _note(text: str) -> Text:
    return Text(text, "dim italic")


def _table(first: str, comparison: Comparison, columns: Sequence[Metric]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold", min_width=16)
    for metric in columns:
        head = metric.head.replace(" ", "\n")
        table.add_column(head, justify="right", no_wrap=True, min_width=9)
    for contender in comparison.shown:
        row = cells(comparison, contender, columns)
        table.add_row(
            title_of(comparison, contender), *(Text(cell.text, "bold" if cell.best else "") for cell in row)
        )
    return table


def csv_of(columns: Sequence[str], rows: Iterable[dict[str, object]]) -> bytes:
    """With a line of heads."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
