"""A method's figures of one round in words, for a line that may be cut: the first declared come first."""

from collections.abc import Iterable, Sequence

from fleetune.coordinator.reports.diagnostics.course import Parts, told_in
from fleetune.coordinator.reports.diagnostics.entries import unit_of
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.method.diagnostics import Diagnostic

_TO = "–"  # noqa: RUF001 - an en dash, as in printed tables


def diagnostics_line(record: RoundRecord, diagnostics: Iterable[Diagnostic], *, plain: bool = False) -> str:
    """Layers sent 62.5 % (50.0–75.0 %), r_ii 10.0–13.3 % by layers; "" where nothing is told.

    Args:
        record: of a round.
        diagnostics: as declared.
        plain: in ASCII, for logs.
    """
    words = ", ".join(_words(one, told) for one in diagnostics if (told := told_in(record, one)))
    return words.replace(_TO, "-").encode("ascii", "replace").decode() if plain else words


def between(low: float, high: float, unit: str) -> str:
    """9.1–13.3 %; one number where both read alike."""
    text = unit_of(unit).text
    least, greatest = text(low), text(high)
    if least == greatest:
        return greatest
    return f"{least.removesuffix(' %')}{_TO}{greatest}"


def _words(diagnostic: Diagnostic, told: Sequence[Parts]) -> str:
    values = [value for figure in told for value in figure.values()]
    mean = unit_of(diagnostic.unit).text(sum(values) / len(values))
    if diagnostic.by:
        means = _part_means(told)
        return f"{diagnostic.title} {between(min(means), max(means), diagnostic.unit)} by {diagnostic.by}"
    spread = between(min(values), max(values), diagnostic.unit)
    return f"{diagnostic.title} {mean}" + (f" ({spread})" if _TO in spread else "")


def _part_means(told: Sequence[Parts]) -> list[float]:
    names = dict.fromkeys(part for figure in told for part in figure)
    columns = ([figure[name] for figure in told if name in figure] for name in names)
    return [sum(column) / len(column) for column in columns]
