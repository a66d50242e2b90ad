"""The tables of a comparison or a sweep for the terminal, and texts that its page shows too."""

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.metric import Metric, unit_of
from fleetune.coordinator.metrics.registry import (
    BEFORE_MEAN,
    BYTES_UP,
    DURATION,
    PERSONAL_MEAN,
    PERSONAL_WORST_DECILE,
    TOOK_PART,
    VALIDATION_MEAN,
)
from fleetune.coordinator.metrics.summary import Summary
from fleetune.protocols.tasks.scores import Score
from fleetune.tools.compare.columns import (
    ACCURACIES,
    BEST_AFTER,
    BYTES_UP_TO_TARGET,
    SECONDS_TO_TARGET,
    TO_TARGET,
    accuracies,
    costs,
)
from fleetune.tools.compare.comparison import AS_ASKED, Comparison, Configuration, Spread, as_text
from fleetune.tools.compare.sheets import Entry, Line, rich_table

MOST_ROWS = 20
NOT_REACHED = "not reached"
UNEQUAL = "accuracies are of the devices that took part: not of the same devices for all"
DIFFERENCES = (PERSONAL_MEAN, BEST_AFTER)
_IN_SWEEP = (PERSONAL_MEAN, PERSONAL_WORST_DECILE, BYTES_UP, DURATION)
_TO_TARGET_IN_SWEEP = (BYTES_UP_TO_TARGET, SECONDS_TO_TARGET)


def warnings(comparison: Comparison) -> list[str]:
    """Return warnings for a reader: different devices took part, or configurations have identical results."""
    counts = [comparison.spread(one.label, TOOK_PART) for one in comparison.shown]
    unequal = len({found.mean for found in counts if found}) > 1
    groups: dict[tuple[object, ...], list[str]] = {}
    for one in comparison.shown:
        rows = [row for row in comparison.rows if row.label == one.label]
        scores = tuple((row.seed, *map(row.of, (PERSONAL_MEAN, BEFORE_MEAN, BEST_AFTER))) for row in rows)
        groups.setdefault(scores, []).append(one.label)
    alike = [_alike(comparison, labels) for labels in groups.values() if len(labels) > 1]
    return [*[UNEQUAL] * unequal, *alike]


def _alike(comparison: Comparison, labels: Sequence[str]) -> str:
    line = f"{' and '.join(map(readable.printable, labels))} trained alike, to the last bit"
    used = {p for label in labels for run in comparison.of(label) for p in _ratios(run.summary)}
    if used != {1.0}:
        return line
    return (
        f"{line}: every device ran at ratio 1, where a method of submodels, such as FedSPU, equals FedAvg. "
        "Assign smaller ratios: --set fleet.ratios=[0.2,0.4,0.6,0.8,1.0]"
    )


def _ratios(summary: Summary) -> set[float]:
    return {ratio for used in summary.ratios.values() for ratio in used}


def comparison_tables(comparison: Comparison) -> Group:
    """Return the tables of accuracies, of costs and of the costs to the target, at most 100 columns wide."""
    parts: list[RenderableType] = [
        *_table(_of_score(comparison.score), comparison, accuracies(comparison.runs)),
        _note(about_seeds(comparison)),
        _note("mean, weighted by samples, what 9 in 10 devices reach: personal models after the last round"),
        _note("best round: of the whole fleet; before, after: local training in one more round"),
        *_table("cost", comparison, costs(comparison.runs)),
        *map(_note, warnings(comparison)),
    ]
    if comparison.target:
        at = unit_of(comparison.score).text(comparison.target.score)
        parts += [
            *_table(f"to {at}", comparison, TO_TARGET),
            _note(f"until personal {comparison.score.title} was {at}: {comparison.target.reason}"),
        ]
    return Group(*parts)


def _table(first: str, comparison: Comparison, columns: Sequence[Metric]) -> list[RenderableType]:
    heads = [first, *(metric.head.replace(" ", "\n") for metric in columns)]
    rows: Iterator[Line] = (
        [title_of(comparison, one), *entries(comparison, one, columns)] for one in comparison.shown
    )
    return [Text(), rich_table(heads, rows, least=9)]


def _note(text: str) -> Text:
    return Text(text, "dim italic")


def differences(comparison: Comparison) -> list[list[str]]:
    """Return rows with a variant, the unchanged method, and the difference of their scores.

    Scores are paired by seed, because runs with equal seeds have the same split of the data. A variant is a
    configuration whose label is not its method's name.
    """
    labels = {one.label for one in comparison.shown}
    rows = []
    for one in comparison.shown:
        whole = str(one.method["name"])
        if one.label != whole and whole in labels:
            found = [comparison.difference(one.label, whole, metric) for metric in DIFFERENCES]
            times = unit_of(comparison.score).on_axis
            rows.append([one.label, whole, *(_signed(spread, times) for spread in found)])
    return rows


def _signed(found: Spread | None, times: float) -> str:
    if not found:
        return readable.UNKNOWN
    form = ".1f" if times > 1 else ".3g"
    within = "" if found.deviation is None else f" ±{times * found.deviation:{form}}"
    return f"{times * found.mean:+{form}}{within}"


def _of_score(score: Score) -> str:
    return f"{score.title}, %" if score.share else f"{score.title}, {score.better} is better"


def title_of(comparison: Comparison, one: Configuration) -> str:
    """Return a configuration's label, with the number of finished seeds if some are missing."""
    finished, asked = len(comparison.of(one.label)), len(comparison.seeds)
    label = readable.printable(one.label)
    return label if finished == asked else f"{label} ({finished} of {asked} seeds)"


def about_seeds(comparison: Comparison) -> str:
    """Return a sentence on the meaning of the numbers before and after ±."""
    seeds = comparison.seeds
    if len(seeds) == 1:
        return f"one run each, seed {seeds[0]}"
    consecutive = list(seeds) == list(range(seeds[0], seeds[0] + len(seeds)))
    which = f"{seeds[0]} to {seeds[-1]}" if consecutive else ", ".join(map(str, seeds))
    return f"mean ± standard deviation over {len(seeds)} seeds ({which})"


def about_ranking(comparison: Comparison) -> str:
    """Return a sentence on which samples (validation or test) rank the sweep."""
    if comparison.ranked_by == VALIDATION_MEAN:
        return "ranked by validation samples; the mean is on test samples"
    return "ranked by test samples, so the best score is optimistic: hold out data.validation_fraction"


def best(comparison: Comparison, metric: Metric) -> set[str]:
    """Return the configurations with the best mean, among those in which every run has the metric."""
    means = {
        one.label: found.mean
        for one in comparison.shown
        if (found := comparison.spread(one.label, metric)) and found.count == len(comparison.of(one.label))
    }
    better = metric.for_score(comparison.score).better
    if not better or len(comparison.shown) < 2:
        return set()
    first = (max if better == "higher" else min)(means.values(), default=None)
    return {label for label, value in means.items() if value == first}


def entries(comparison: Comparison, one: Configuration, columns: Sequence[Metric]) -> list[Entry]:
    """Return the row of a configuration: each metric over its seeds, and whether it is the best of the
    column.
    """
    found = [comparison.spread(one.label, metric) for metric in columns]
    if columns is TO_TARGET and not found[0]:
        return [Entry(NOT_REACHED), *(Entry(readable.UNKNOWN) for _ in columns[1:])]
    runs = len(comparison.of(one.label))
    return [
        Entry(
            _text(metric.for_score(comparison.score), spread, runs, columns),
            one.label in best(comparison, metric),
        )
        for metric, spread in zip(columns, found, strict=True)
    ]


def _text(metric: Metric, found: Spread | None, runs: int, columns: Sequence[Metric]) -> str:
    """Return mean and deviation as text, with the number of runs if some lack the metric.

    In a table of accuracies the column's head has the percent sign.
    """
    if not found:
        return readable.UNKNOWN
    text = metric.unit.spread(found.mean, found.deviation)
    text = text.removesuffix(f" {metric.unit.sign}") if columns[: len(ACCURACIES)] == ACCURACIES else text
    return text + (f" ({found.count} of {runs})" if found.count < runs else "")


def sweep_table(comparison: Comparison) -> Group:
    """Return the best combinations of a ranked sweep; with costs to a target if one was requested."""
    target = comparison.target if comparison.target and comparison.target.reason == AS_ASKED else None
    columns = (PERSONAL_MEAN, *_TO_TARGET_IN_SWEEP) if target else _IN_SWEEP
    if comparison.ranked_by == VALIDATION_MEAN:
        columns = (VALIDATION_MEAN, *columns)
    aim = f"\nto {unit_of(comparison.score).text(target.score)}" if target else ""
    heads = short_names(comparison.keys) + [
        metric.head.replace(" ", "\n") + aim * (metric in _TO_TARGET_IN_SWEEP) for metric in columns
    ]
    rows: Iterator[Line] = (
        [
            *(readable.printable(as_text(one.value(key))) for key in comparison.keys),
            *entries(comparison, one, columns),
        ]
        for one in comparison.shown[:MOST_ROWS]
    )
    more = len(comparison.shown) - MOST_ROWS
    lines = [about_seeds(comparison), about_ranking(comparison)]
    lines += [f"{more} more: report.html"] * (more > 0)
    lines += [f"{readable.UNKNOWN}: {NOT_REACHED}"] * (target is not None)
    return Group(Text(), rich_table(heads, rows, texts=len(comparison.keys)), *map(_note, lines))


def short_names(keys: Sequence[str]) -> list[str]:
    """Return short names of settings for narrow columns, in the same order."""
    lasts = [key.rpartition(".")[2] for key in keys]
    return [
        "method" if key == "method.name" else last if lasts.count(last) == 1 else key
        for key, last in zip(keys, lasts, strict=True)
    ]
