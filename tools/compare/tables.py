"""A comparison as tables for the terminal and the page, and as CSV files."""

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.reports import readable
from fleetune.coordinator.reports.summary import Summary
from fleetune.tools.compare.comparison import Comparison, Contender, Figures, Spread

NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Column:
    """A figure of the contenders, as a column.

    Attributes:
        figure: a field of `Figures`.
        head: over the column.
        show: a figure's spread over seeds as text.
        good: 1: more is better, -1: less is, 0: neither.
    """

    figure: str
    head: str
    show: Callable[[Spread], str]
    good: int = 0


@dataclass(frozen=True)
class Cell:
    """What stands in a table, and whether nobody does better."""

    text: str
    best: bool = False


def _percent(found: Spread) -> str:
    return readable.spread(100 * found.mean, None if found.deviation is None else 100 * found.deviation, 1)


def _count(found: Spread) -> str:
    return readable.spread(found.mean, found.deviation)


def _size(found: Spread) -> str:
    return readable.size_spread(found.mean, found.deviation)


def _duration(found: Spread) -> str:
    return readable.duration_spread(found.mean, found.deviation)


ACCURACIES = (
    Column("personal_mean", "mean", _percent, 1),
    Column("personal_weighted", "weighted", _percent, 1),
    Column("personal_worst_decile", "worst decile", _percent, 1),
    Column("best_after", "best round", _percent, 1),
    Column("before_mean", "before", _percent, 1),
    Column("after_mean", "after", _percent, 1),
)
COSTS = (
    Column("rounds", "rounds", _count),
    Column("devices", "devices", _count, 1),
    Column("bytes_up", "sent up", _size),
    Column("bytes_down", "sent down", _size),
    Column("seconds", "time", _duration),
)
TO_TARGET = (
    Column("rounds_to_target", "rounds", _count, -1),
    Column("bytes_up_to_target", "sent up", _size, -1),
    Column("bytes_down_to_target", "sent down", _size, -1),
    Column("seconds_to_target", "time", _duration, -1),
)


NOT_ALL = "accuracies are of the devices that took part: not of the same devices for all"


def unequal(comparison: Comparison) -> bool:
    """Whether some contender left out devices that another one served."""
    counts = [comparison.spread(contender.label, "devices") for contender in comparison.shown]
    return len({found.mean for found in counts if found}) > 1


def alike(comparison: Comparison) -> list[str]:
    """A line for all contenders whose runs came to the same accuracies, to the last bit."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for one in comparison.shown:
        found = [run for run in comparison.figures if run.contender == one.label]
        course = tuple((run.seed, run.personal_mean, run.before_mean, run.best_after) for run in found)
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
        _table("accuracy, %", comparison, ACCURACIES),
        _note(about_seeds(comparison)),
        _note("mean, weighted by samples, what 9 in 10 devices reach: personal models after the last round"),
        _note("best round: of the whole fleet; before, after: local training in one more round"),
        Text(),
        _table("cost", comparison, COSTS),
        *([_note(NOT_ALL)] if unequal(comparison) else []),
        *(_note(line) for line in alike(comparison)),
    ]
    if comparison.target:
        at = readable.percent(comparison.target.accuracy)
        parts += [
            Text(),
            _table(f"to {at}", comparison, TO_TARGET),
            _note(f"until personal accuracy was {at}: {comparison.target.reason}"),
        ]
    return Group(*parts)


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
    return f"mean ± standard deviation over {len(seeds)} seeds ({seeds[0]} to {seeds[-1]})"


def best(comparison: Comparison, column: Column) -> set[str]:
    """The contenders whose mean is the best of the column, of those where every run has the figure (who
    reached the target with one seed of three is no example). None where there is no rivalry.
    """
    means = {
        contender.label: column.good * found.mean
        for contender in comparison.shown
        if (found := comparison.spread(contender.label, column.figure))
        and found.count == len(comparison.of(contender.label))
    }
    if not column.good or len(comparison.shown) < 2:
        return set()
    return {label for label, value in means.items() if value == max(means.values())}


def runs_csv(comparison: Comparison) -> bytes:
    """All figures, one row a run; accuracies as fractions, bytes, seconds. Empty: it has none."""
    return _csv([field.name for field in fields(Figures)], (asdict(one) for one in comparison.figures))


def methods_csv(comparison: Comparison) -> bytes:
    """One row a contender: of each figure the mean over seeds, the deviation, and how many runs have it."""
    names = [field.name for field in fields(Figures) if field.name not in ("contender", "method", "seed")]
    parts = ("mean", "deviation", "count")
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
            row.update(target=comparison.target.accuracy, target_reason=comparison.target.reason)
        for name in names:
            found = comparison.spread(contender.label, name)
            row.update(
                {f"{name}_{part}": getattr(found, part, 0 if part == "count" else None) for part in parts}
            )
        rows.append(row)
    return _csv([*columns, *(f"{name}_{part}" for name in names for part in parts)], rows)


def rounds_csv(comparison: Comparison) -> bytes:
    """What the curves are drawn from: one row a round of a run."""
    rows = (
        {"contender": run.label, "seed": run.seed, **asdict(point)}
        for run in comparison.runs
        for point in run.points
    )
    columns = ["contender", "seed", "number", "closed_s", "up", "down", "before", "after", "known"]
    return _csv(columns, rows)


def cells(comparison: Comparison, contender: Contender, columns: Sequence[Column]) -> list[Cell]:
    """The contender's row: each figure over its seeds, and whether it is the best of the column."""
    found = [comparison.spread(contender.label, column.figure) for column in columns]
    if columns is TO_TARGET and not found[0]:
        return [Cell(NOT_REACHED), *(Cell(readable.UNKNOWN) for _ in columns[1:])]
    there = len(comparison.of(contender.label))
    return [
        Cell(
            (column.show(one) + (f" ({one.count} of {there})" if one.count < there else ""))
            if one
            else readable.UNKNOWN,
            contender.label in best(comparison, column),
        )
        for column, one in zip(columns, found, strict=True)
    ]


def _note(text: str) -> Text:
    return Text(text, "dim italic")


def _table(first: str, comparison: Comparison, columns: Sequence[Column]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold", min_width=16)
    for column in columns:
        table.add_column(column.head.replace(" ", "\n"), justify="right", no_wrap=True, min_width=9)
    for contender in comparison.shown:
        row = cells(comparison, contender, columns)
        table.add_row(
            title_of(comparison, contender), *(Text(cell.text, "bold" if cell.best else "") for cell in row)
        )
    return table


def _csv(columns: Sequence[str], rows: Iterable[dict[str, object]]) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()
