"""Diagnostics that a method reports: values of a round, history over a run, metrics, and one line of text."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from fleetune.coordinator.metrics.averages import mean
from fleetune.coordinator.metrics.metric import FRACTION, NUMBER, Metric, Unit, Value
from fleetune.coordinator.metrics.summary import DiagnosticHistory, Summary
from fleetune.coordinator.rounds.records import DeviceRound, Diagnostics, RoundRecord
from fleetune.protocols.method.diagnostics import Diagnostic

MAX_POINTS = 100  # entries of a history; each may cover several rounds
PREFIX = "method."  # prefix of the names of these metrics
_NO_PART = ""  # the part of a diagnostic without parts
_TO = "–"  # noqa: RUF001 - an en dash, as in printed tables

Parts = Mapping[str, float]


def values_in(record: RoundRecord, diagnostic: Diagnostic) -> list[Parts]:
    """Return a diagnostic's values in one round: a mapping from part to value for each update.

    A diagnostic of the method's state has one mapping, for the state after the round. A diagnostic without
    parts has the single part "".
    """
    of_updates = diagnostic.of == "update"
    sources: Iterable[Diagnostics] = (
        (reply.diagnostics for reply in record.devices.values()) if of_updates else [record.diagnostics]
    )
    figures = (source.get(diagnostic.name) for source in sources)
    return [one if isinstance(one, dict) else {_NO_PART: one} for one in figures if one is not None]


def histories(
    diagnostics: Iterable[Diagnostic], training: Sequence[RoundRecord], most: int = MAX_POINTS
) -> dict[str, DiagnosticHistory]:
    """Return the history of each diagnostic that any training round reports, by name, in the declared order.

    Args:
        diagnostics: diagnostics that the method declares.
        training: records of the training rounds, ascending.
        most: largest number of entries in a history. If there are more rounds, each entry is the mean over an
            equal number of rounds.
    """
    found = {one.name: _history(one, training, most) for one in diagnostics}
    return {name: history for name, history in found.items() if history is not None}


def _history(diagnostic: Diagnostic, training: Sequence[RoundRecord], most: int) -> DiagnosticHistory | None:
    known = [(record.number, parts) for record in training if (parts := values_in(record, diagnostic))]
    if not known:
        return None
    width = -(-len(known) // most)
    bins = [known[start : start + width] for start in range(0, len(known), width)]
    figures = [[figure for _, parts in one for figure in parts] for one in bins]
    values = [_values(one) for one in figures]
    names = list(dict.fromkeys(part for one in figures for figure in one for part in figure))
    overall = [value for one in values for value in one]
    return DiagnosticHistory(
        title=diagnostic.title,
        about=diagnostic.about,
        unit=diagnostic.unit,
        of=diagnostic.of,
        by=diagnostic.by,
        value=_mean(overall if diagnostic.of == "update" else _values(known[-1][1])),
        rounds=[one[-1][0] for one in bins],
        mean=[_mean(one) for one in values],
        least=[min(one) for one in values],
        greatest=[max(one) for one in values],
        parts={name: [mean(figure.get(name) for figure in one) for one in figures] for name in names}
        if diagnostic.by
        else {},
    )


def metric_of(diagnostic: Diagnostic) -> Metric:
    """Return the metric that shows a diagnostic; for a diagnostic with parts, the mean over the parts.

    A diagnostic of updates is averaged over rounds and devices. A diagnostic of the state shows its last
    value.
    """

    def of_reply(reply: DeviceRound) -> Value:
        found = reply.diagnostics.get(diagnostic.name)
        return mean(found.values()) if isinstance(found, dict) else found

    return Metric(
        PREFIX + diagnostic.name,
        diagnostic.title,
        as_sentence(diagnostic.about),
        unit_of_diagnostic(diagnostic.unit),
        reply=of_reply if diagnostic.of == "update" else None,
        over_rounds=mean,
        over_devices=mean,
        round=lambda record: mean(_values(values_in(record, diagnostic))),
        run=_of_run(diagnostic.name),
    )


def metrics_in(summaries: Iterable[Summary]) -> list[Metric]:
    """Return a metric for each diagnostic in these summaries; it reads its values from runs and devices."""
    found: dict[str, DiagnosticHistory] = {}
    for summary in summaries:
        for name, history in summary.diagnostics_by_name.items():
            found.setdefault(name, history)
    return [
        Metric(
            PREFIX + name, one.title, as_sentence(one.about), unit_of_diagnostic(one.unit), run=_of_run(name)
        )
        for name, one in found.items()
    ]


def _of_run(name: str) -> Callable[[Summary], Value]:
    def of(summary: Summary) -> Value:
        history = summary.diagnostics_by_name.get(name)
        return history.value if history else None

    return of


def unit_of_diagnostic(unit: str) -> Unit:
    """Return the unit for the unit name that a method declares; `share` is shown in percent."""
    return FRACTION if unit == "share" else NUMBER


def as_sentence(about: str) -> str:
    """Return a diagnostic's description, which may be a phrase, as a sentence. A leading symbol stays
    unchanged.
    """
    first, *_ = about.split(maxsplit=1) or [""]
    begun = about[:1].upper() + about[1:] if first.isalpha() and len(first) > 1 else about
    return begun if begun.endswith(".") else f"{begun}."


def diagnostics_line(record: RoundRecord, diagnostics: Iterable[Diagnostic], *, plain: bool = False) -> str:
    """Return all diagnostics of a round in one line, in the declared order; "" if there are none.

    E.g. `Layers sent 62.5 % (50.0–75.0 %), r_ii 10.0–13.3 % by layers`.

    Args:
        record: record of the round.
        diagnostics: diagnostics that the method declares.
        plain: True for ASCII text, for logs.
    """
    line = ", ".join(_text(one, parts) for one in diagnostics if (parts := values_in(record, one)))
    return line.replace(_TO, "-").encode("ascii", "replace").decode() if plain else line


def between(low: float, high: float, unit: str) -> str:
    """Return a range such as 9.1–13.3 %; one number if both ends look the same as text."""
    text = unit_of_diagnostic(unit).text
    least, greatest = text(low), text(high)
    return greatest if least == greatest else f"{least.removesuffix(' %')}{_TO}{greatest}"


def _text(diagnostic: Diagnostic, figures: Sequence[Parts]) -> str:
    values = _values(figures)
    if diagnostic.by:
        names = dict.fromkeys(part for figure in figures for part in figure)
        means = [_mean([figure[name] for figure in figures if name in figure]) for name in names]
        return f"{diagnostic.title} {between(min(means), max(means), diagnostic.unit)} by {diagnostic.by}"
    spread = between(min(values), max(values), diagnostic.unit)
    text = unit_of_diagnostic(diagnostic.unit).text(_mean(values))
    return f"{diagnostic.title} {text}" + (f" ({spread})" if _TO in spread else "")


def _values(figures: Iterable[Parts]) -> list[float]:
    return [value for figure in figures for value in figure.values()]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
