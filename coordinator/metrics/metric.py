"""The class of a metric: name, unit, how to read it, how to aggregate it, and where to show it.

`registry` lists all metrics.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.averages import total
from fleetune.coordinator.metrics.summary import DeviceSummary, Summary
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.protocols.tasks.scores import ACCURACY, Score

Value = float | None
Average = Callable[[Iterable[Value]], Value]
Place = Literal["run table", "device table", "run page", "device page", "live", "comparison"]
"""Places that show metrics: terminal tables, report.html, live view and log, edge-sim compare."""


@dataclass(frozen=True)
class Unit:
    """A unit of values, with the functions that format them.

    Attributes:
        name: plural name without a prefix, for exporters, e.g. seconds, bytes; "" for counts.
        text: formats a value; "–" for None.
        spread: formats a mean and its standard deviation, which may be None.
        sign: text after the numbers of an axis.
        change: formats a pair of values, before and after.
        gain: formats a difference.
        on_axis: factor that converts a value to its position on an axis.
    """

    name: str
    text: Callable[[Value], str]
    spread: Callable[[float, Value], str]
    sign: str = ""
    change: Callable[[Value, Value], str] = readable.number_change
    gain: Callable[[Value], str] = readable.number_gain
    on_axis: float = 1.0


COUNT = Unit("", readable.count, readable.spread)
NUMBER = Unit("", readable.number, readable.number_spread)
FRACTION = Unit(
    "ratio", readable.percent, readable.percent_spread, "%", readable.change, readable.points, 100.0
)
POINTS = Unit("ratio", readable.points, readable.points_spread, "points")
GAIN_IN_NUMBERS = Unit("", readable.number_gain, readable.number_spread)
SECONDS = Unit("seconds", readable.duration, readable.duration_spread, "s")
BYTES = Unit("bytes", readable.size, readable.size_spread, "B")
JOULES = Unit("joules", readable.energy, readable.energy_spread, "J")


@dataclass(frozen=True)
class Metric:
    """One figure of a reply, a round, a device or a whole run, and how to read it from each of them.

    Attributes:
        name: stable name in snake case, for CSV columns, summary.json and exporters.
        title: title for people and for column heads.
        about: description in one sentence.
        unit: unit of its values.
        better: "higher" or "lower"; None if neither is better by itself (e.g. bytes without the score).
        reply: function that reads the metric from a device's reply.
        predicted: function that reads the device's prediction for that reply; None if devices do not predict
            it.
        over_rounds: function that aggregates one device's replies; exporters treat a `total` as a counter.
        over_devices: function that aggregates the devices of a round or a run.
        round: function that reads the metric from a closed round; None to apply `over_devices` to its
            replies.
        device, run: functions that read the metric from summary.json; None if summary.json has it under
            `metrics` or not at all.
        judges: True for a score of a model; title and unit then follow the score of the run's task.
        short: title for narrow places; "" to use `title`.
        shown: places that show the metric.
    """

    name: str
    title: str
    about: str
    unit: Unit
    better: Literal["higher", "lower"] | None = None
    reply: Callable[[DeviceRound], Value] | None = None
    predicted: Callable[[DeviceRound], Value] | None = None
    over_rounds: Average = total
    over_devices: Average = total
    round: Callable[[RoundRecord], Value] | None = None
    device: Callable[[DeviceSummary], Value] | None = None
    run: Callable[[Summary], Value] | None = None
    judges: bool = False
    short: str = ""
    shown: tuple[Place, ...] = ()

    def for_score(self, score: Score) -> "Metric":
        """Return the metric with title and unit for a run whose models are judged by `score`."""
        if not self.judges or score == ACCURACY:
            return self
        return replace(
            self,
            title=self.title.replace(ACCURACY.title, score.title),
            about=self.about.replace("Accuracy", capital(score.title)).replace(ACCURACY.title, score.title),
            unit=gain_of(score) if self.unit is POINTS else unit_of(score),
            better=self.better if self.unit is POINTS else score.better,
            short=self.short.replace(ACCURACY.title, score.title),
        )

    def column(self, score: Score) -> str:
        """Return the metric's column name in tables of plain numbers, in a run whose models are judged by
        `score`.

        The score's name replaces `accuracy` in the metric's name, or is put in front: `mae_after`,
        `mae_personal_mean`.
        """
        if not self.judges:
            return self.name
        if ACCURACY.name in self.name:
            return self.name.replace(ACCURACY.name, score.name)
        return f"{score.name}_{self.name}"

    @property
    def head(self) -> str:
        """Title for the head of a narrow column."""
        return self.short or self.title

    @property
    def axis(self) -> str:
        """Label of an axis."""
        return f"{self.title}, {self.unit.sign}" if self.unit.sign else self.title

    def of_reply(self, reply: DeviceRound) -> Value:
        """Return the metric's value in a device's reply."""
        return self.reply(reply) if self.reply else None

    def predicted_of(self, reply: DeviceRound) -> Value:
        """Return the value that the device predicted for the reply."""
        return self.predicted(reply) if self.predicted else None

    def of_round(self, record: RoundRecord) -> Value:
        """Return the metric's value in a closed round, over all replies."""
        if self.round:
            return self.round(record)
        return self.over_devices(self.of_reply(reply) for reply in record.devices.values())

    def of_replies(self, replies: Iterable[DeviceRound]) -> Value:
        """Return the metric's value for one device, over its rounds."""
        return self.over_rounds(self.of_reply(reply) for reply in replies)

    def of_device(self, row: DeviceSummary) -> Value:
        """Return the metric's value for one device of summary.json."""
        return self.device(row) if self.device else _among(row.metrics, self.name)

    def of_run(self, summary: Summary) -> Value:
        """Return the metric's value for the whole run of summary.json."""
        return self.run(summary) if self.run else _among(summary.metrics, self.name)


def unit_of(score: Score) -> Unit:
    """Return the unit of a score."""
    return FRACTION if score.share else NUMBER


def gain_of(score: Score) -> Unit:
    """Return the unit for differences of a score, with the sign such that a positive difference is better."""
    return POINTS if score.share else GAIN_IN_NUMBERS


def titled(score: Score, rest: str) -> str:
    """Return the title of a picture of a score."""
    return f"{capital(score.title)} {rest}"


def capital(title: str) -> str:
    """Return the title with its first letter in upper case."""
    return title[:1].upper() + title[1:]


def _among(metrics: object, name: str) -> Value:
    return metrics.get(name) if isinstance(metrics, dict) else None
