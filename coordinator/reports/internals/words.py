"""A method's figures of one round in words, for a line that may be cut: the first declared come first."""

from collections.abc import Iterable, Sequence

from fleetune.coordinator.reports.internals.course import Parts, told_in
from fleetune.coordinator.reports.internals.entries import unit_of
from fleetune.coordinator.rounds.records import RoundRecord
from fleetune.protocols.skeletons.internals import Internal

_TO = "–"  # noqa: RUF001 - an en dash, as in printed tables


def inside_line(record: RoundRecord, internals: Iterable[Internal], *, plain: bool = False) -> str:
    """Layers sent 62.5 % (50.0–75.0 %), r_ii 10.0–13.3 % by layers; "" where nothing is told.

    Args:
        record: of a round.
        internals: as declared.
        plain: in ASCII, for logs.
    """
    words = ", ".join(_words(one, told) for one in internals if (told := told_in(record, one)))
    return words.replace(_TO, "-").encode("ascii", "replace").decode() if plain else words


def between(low: float, high: float, unit: str) -> str:
    """9.1–13.3 %; one number where both read alike."""
    text = unit_of(unit).text
    least, greatest = text(low), text(high)
    if least == greatest:
        return greatest
    return f"{least.removesuffix(' %')}{_TO}{greatest}"


def _words(internal: Internal, told: Sequence[Parts]) -> str:
    values = [value for figure in told for value in figure.values()]
    mean = unit_of(internal.unit).text(sum(values) / len(values))
    if internal.by:
        means = _part_means(told)
        return f"{internal.title} {between(min(means), max(means), internal.unit)} by {internal.by}"
    spread = between(min(values), max(values), internal.unit)
    return f"{internal.title} {mean}" + (f" ({spread})" if _TO in spread else "")


def _part_means(told: Sequence[Parts]) -> list[float]:
    names = dict.fromkeys(part for figure in told for part in figure)
    columns = ([figure[name] for figure in told if name in figure] for name in names)
    return [sum(column) / len(column) for column in columns]
