"""A sweep as a table for the terminal, as CSV, and as summary.json. The comparison is ranked: best first."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import unit_of
from fleetune.coordinator.metrics.registry import (
    BYTES_UP,
    DURATION,
    PERSONAL_MEAN,
    PERSONAL_WORST_DECILE,
    VALIDATION_MEAN,
)
from fleetune.tools.compare.comparison import AS_ASKED, Comparison, Contender
from fleetune.tools.compare.figures import BYTES_UP_TO_TARGET, SECONDS_TO_TARGET, metrics
from fleetune.tools.compare.tables import NOT_REACHED, about_seeds, cells, csv_of, spread_names, spread_of

MOST_ROWS = 20
_SHOWN = (PERSONAL_MEAN, PERSONAL_WORST_DECILE, BYTES_UP, DURATION)
_TO_TARGET = (BYTES_UP_TO_TARGET, SECONDS_TO_TARGET)


def value_of(contender: Contender, key: str) -> Any:
    """What a combination has for a setting."""
    return contender.method["name"] if key == "method.name" else contender.changes[key]


def sweep_table(comparison: Comparison, keys: Sequence[str]) -> Group:
    """The best combinations: their values, and what they came to; the cost of a target where one was asked
    for.
    """
    target = comparison.target if comparison.target and comparison.target.reason == AS_ASKED else None
    columns = (PERSONAL_MEAN, *_TO_TARGET) if target else _SHOWN
    if comparison.ranked_by == VALIDATION_MEAN:
        columns = (VALIDATION_MEAN, *columns)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    for key in short_names(keys):
        table.add_column(key, overflow="fold", min_width=len(key))
    for metric in columns:
        head = metric.head.replace(" ", "\n")
        aim = f"\nto {unit_of(comparison.score).text(target.score)}" if target else ""
        table.add_column(head + (aim if metric in _TO_TARGET else ""), justify="right", no_wrap=True)
    shown = comparison.shown
    for one in shown[:MOST_ROWS]:
        found = cells(comparison, one, columns)
        values = [readable.printable(in_words(value_of(one, key))) for key in keys]
        table.add_row(*values, *(Text(cell.text, "bold" if cell.best else "") for cell in found))
    more = len(shown) - MOST_ROWS
    lines = [
        about_seeds(comparison),
        comparison.about_ranking,
        *([f"{more} more: sweep.csv"] if more > 0 else []),
    ]
    if target:
        lines.append(f"{readable.UNKNOWN}: {NOT_REACHED}")
    notes: list[RenderableType] = [Text(line, "dim italic") for line in lines]
    return Group(Text(), table, *notes)


def combinations_csv(comparison: Comparison, keys: Sequence[str]) -> bytes:
    """One row a combination: its values, and of each figure the mean over seeds, the deviation, and how many
    runs have it.
    """
    rows = []
    for rank, one in enumerate(comparison.shown, 1):
        row: dict[str, object] = {"rank": rank, **{key: in_words(value_of(one, key)) for key in keys}}
        row["seeds"] = len(comparison.of(one.label))
        for metric in metrics():
            row.update(spread_of(comparison, one, metric))
        rows.append(row)
    figures = [name for metric in metrics() for name in spread_names(metric)]
    return csv_of(["rank", *keys, "seeds", *figures], rows)


def sweep_summary(comparison: Comparison, over: Mapping[str, Sequence[Any]], failed: Sequence[str]) -> bytes:
    """What a script wants of it, as JSON: the combinations with their scores, the best first.

    `target` is a score; `to_target` is what it took until the personal models' mean was there, left out where
    it never was.
    """
    found = [_combination(comparison, one, list(over)) for one in comparison.shown]
    content = {
        "name": comparison.name,
        "over": over,
        "seeds": comparison.seeds,
        "score": comparison.score.name,
        "better": comparison.score.better,
        "target": comparison.target.score if comparison.target else None,
        "best": found[0]["settings"] if found else None,
        "ranked_by": comparison.ranked_by.name,
        "combinations": found,
        "failed": list(failed),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"


def _combination(comparison: Comparison, one: Contender, keys: Sequence[str]) -> dict[str, Any]:
    found = {
        metric.name: comparison.spread(one.label, metric)
        for metric in (*_SHOWN, VALIDATION_MEAN, *_TO_TARGET)
    }
    figures = {
        name: {"mean": spread.mean, "deviation": spread.deviation, "count": spread.count}
        for name, spread in found.items()
        if spread
    }
    values = {key: value_of(one, key) for key in keys}
    return {"settings": values, "seeds": len(comparison.of(one.label)), **figures}


def short_names(keys: Sequence[str]) -> list[str]:
    """What settings are called where there is little room, in the same order."""
    lasts = [key.rpartition(".")[2] for key in keys]
    return [
        "method" if key == "method.name" else last if lasts.count(last) == 1 else key
        for key, last in zip(keys, lasts, strict=True)
    ]


def in_words(value: Any) -> str:
    """A setting's value where it is read."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
