"""A method's figures as entries like those of the table of metrics: name, unit, how they are summed up."""

from collections.abc import Callable, Iterable, Mapping

from fleetune.coordinator.reports.averages import mean
from fleetune.coordinator.reports.internals.course import told_in
from fleetune.coordinator.reports.metric import FRACTION, NUMBER, Metric, Unit, Value
from fleetune.coordinator.reports.summary import InternalCourse, Summary
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.coordinator.store.run_folder import INSIDE
from fleetune.protocols.skeletons.internals import Internal

PREFIX = "method."  # of metrics
PICTURE = f"{INSIDE}/"  # of pictures
_UNITS: Mapping[str, Unit] = {"share": FRACTION}


def unit_of(unit: str) -> Unit:
    """Of a unit as methods name it."""
    return _UNITS.get(unit, NUMBER)


def sentence(about: str) -> str:
    """What a method says of a figure, as a sentence: some write a phrase. A symbol that begins it stays."""
    first, *_ = about.split(maxsplit=1) or [""]
    begun = about[:1].upper() + about[1:] if first.isalpha() and len(first) > 1 else about
    return begun if begun.endswith(".") else f"{begun}."


def metric_of(internal: Internal) -> Metric:
    """A figure as a metric; where it has parts, their mean.

    Of an update it is averaged over rounds and devices; of the state after a round the last counts.
    """
    name = internal.name

    def of_reply(reply: DeviceRound) -> Value:
        told = reply.internals.get(name)
        return mean(told.values()) if isinstance(told, dict) else told

    def of_round(record: RoundRecord) -> Value:
        return mean(value for figure in told_in(record, internal) for value in figure.values())

    return Metric(
        PREFIX + name,
        internal.title,
        sentence(internal.about),
        unit_of(internal.unit),
        reply=of_reply if internal.of == "update" else None,
        over_rounds=mean,
        over_devices=mean,
        round=of_round,
        run=_of_run(name),
    )


def metrics_in(summaries: Iterable[Summary]) -> list[Metric]:
    """Those that summary.json tells of any of these runs; they are read of runs and devices."""
    found: dict[str, InternalCourse] = {}
    for summary in summaries:
        for name, course in summary.inside.items():
            found.setdefault(name, course)
    return [
        Metric(PREFIX + name, one.title, sentence(one.about), unit_of(one.unit), run=_of_run(name))
        for name, one in found.items()
    ]


def _of_run(name: str) -> Callable[[Summary], Value]:
    def of(summary: Summary) -> Value:
        course = summary.inside.get(name)
        return course.value if course else None

    return of
