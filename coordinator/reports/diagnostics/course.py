"""The course of a method's figures over a run, from its records: how `summary.DiagnosticHistory` is made."""

from collections.abc import Iterable, Mapping, Sequence

from fleetune.coordinator.metrics.averages import mean
from fleetune.coordinator.metrics.summary import DiagnosticHistory
from fleetune.coordinator.rounds.records import Diagnostics, RoundRecord
from fleetune.protocols.method.diagnostics import Diagnostic

MOST_POINTS = 100  # of a course: each may stand for several rounds

Parts = Mapping[str, float]
_ONE = ""  # the part of a figure that has none


def courses(
    diagnostics: Iterable[Diagnostic], training: Sequence[RoundRecord], most: int = MOST_POINTS
) -> dict[str, DiagnosticHistory]:
    """Of those that any training round tells, by name, in the order in which the method declares them.

    Args:
        diagnostics: as declared.
        training: records of the training rounds, ascending.
        most: entries of a course; more rounds than that are put together, as many into each entry.
    """
    told = {one.name: _course(one, training, most) for one in diagnostics}
    return {name: course for name, course in told.items() if course is not None}


def told_in(record: RoundRecord, diagnostic: Diagnostic) -> list[Parts]:
    """By part, of each update of a round, or of the state after it; a figure without parts has one, ""."""
    of_updates = diagnostic.of == "update"
    sources: Iterable[Diagnostics] = (
        (reply.diagnostics for reply in record.devices.values()) if of_updates else [record.diagnostics]
    )
    figures = (source.get(diagnostic.name) for source in sources)
    return [one if isinstance(one, dict) else {_ONE: one} for one in figures if one is not None]


def _course(diagnostic: Diagnostic, training: Sequence[RoundRecord], most: int) -> DiagnosticHistory | None:
    known = [(record.number, told) for record in training if (told := told_in(record, diagnostic))]
    if not known:
        return None
    width = -(-len(known) // most)
    bins = [known[start : start + width] for start in range(0, len(known), width)]
    together = [[figure for _, told in one for figure in told] for one in bins]
    values = [[value for figure in figures for value in figure.values()] for figures in together]
    names = list(dict.fromkeys(part for figures in together for figure in figures for part in figure))
    means = [_mean(one) for one in values]
    overall = [value for one in values for value in one]
    return DiagnosticHistory(
        title=diagnostic.title,
        about=diagnostic.about,
        unit=diagnostic.unit,
        of=diagnostic.of,
        by=diagnostic.by,
        value=_mean(overall) if diagnostic.of == "update" else _mean(_values(known[-1][1])),
        rounds=[one[-1][0] for one in bins],
        mean=means,
        least=[min(one) for one in values],
        greatest=[max(one) for one in values],
        parts={name: [mean(figure.get(name) for figure in figures) for figures in together] for name in names}
        if diagnostic.by
        else {},
    )


def _values(told: Iterable[Parts]) -> list[float]:
    return [value for figure in told for value in figure.values()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
