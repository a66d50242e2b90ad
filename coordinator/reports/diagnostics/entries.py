"""A method's figures as entries like those of the table of metrics: name, unit, how they are summed up."""

from collections.abc import Callable, Iterable, Mapping

from fleetune.coordinator.metrics.averages import mean
from fleetune.coordinator.metrics.metric import FRACTION, NUMBER, Metric, Unit, Value
from fleetune.coordinator.metrics.summary import DiagnosticHistory, Summary
from fleetune.coordinator.reports.diagnostics.course import told_in
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.coordinator.store.run_folder import DIAGNOSTICS
from fleetune.protocols.method.diagnostics import Diagnostic

PREFIX = "method."  # of metrics
PICTURE = f"{DIAGNOSTICS}/"  # of pictures
_UNITS: Mapping[str, Unit] = {"share": FRACTION}


def unit_of(unit: str) -> Unit:
    """Of a unit as methods name it."""
    return _UNITS.get(unit, NUMBER)


def sentence(about: str) -> str:
    """What a method says of a figure, as a sentence: some write a phrase. A symbol that begins it stays."""
    first, *_ = about.split(maxsplit=1) or [""]
    begun = about[:1].upper() + about[1:] if first.isalpha() and len(first) > 1 else about
    return begun if begun.endswith(".") else f"{begun}."


def metric_of(diagnostic: Diagnostic) -> Metric:
    """A figure as a metric; where it has parts, their mean.

    Of an update it is averaged over rounds and devices; of the state after a round the last counts.
    """
    name = diagnostic.name

    def of_reply(reply: DeviceRound) -> Value:
        told = reply.diagnostics.get(name)
        return mean(told.values()) if isinstance(told, dict) else told

    def of_round(record: RoundRecord) -> Value:
        return mean(value for figure in told_in(record, diagnostic) for value in figure.values())

    return Metric(
        PREFIX + name,
        diagnostic.title,
        sentence(diagnostic.about),
        unit_of(diagnostic.unit),
        reply=of_reply if diagnostic.of == "update" else None,
        over_rounds=mean,
        over_devices=mean,
        round=of_round,
        run=_of_run(name),
    )


def metrics_in(summaries: Iterable[Summary]) -> list[Metric]:
    """Those that summary.json tells of any of these runs; they are read of runs and devices."""
    found: dict[str, DiagnosticHistory] = {}
    for summary in summaries:
        for name, course in summary.diagnostics_by_name.items():
            found.setdefault(name, course)
    return [
        Metric(PREFIX + name, one.title, sentence(one.about), unit_of(one.unit), run=_of_run(name))
        for name, one in found.items()
    ]


def _of_run(name: str) -> Callable[[Summary], Value]:
    def of(summary: Summary) -> Value:
        course = summary.diagnostics_by_name.get(name)
        return course.value if course else None

    return of
