"""What a metric is: its name, its unit, how it is read and summed up, where it is shown; see `metrics`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from fleetune.coordinator.metrics import readable
from fleetune.coordinator.metrics.averages import total
from fleetune.coordinator.metrics.summary import DeviceSummary, Summary
from fleetune.coordinator.rounds.records import DeviceRound, RoundRecord
from fleetune.protocols.tasks.scores import ACCURACY, Score

Value = float | None
Average = Callable[[Iterable[Value]], Value]
Place = Literal[
    "summary",
    "predictions",
    "round line",
    "live view",
    "run table",
    "device table",
    "page cards",
    "page methods",
    "page devices",
    "comparison",
]


@dataclass(frozen=True)
class Unit:
    """What values are measured in.

    Attributes:
        name: as exporters write it, in plural and without a prefix: seconds, bytes; "" for counts.
        text: a value for people; "–" for what is not known.
        spread: a mean and its standard deviation (None: there is none) for people.
        sign: behind the numbers of an axis.
        change: two values, before and after, for people.
        gain: a difference for people.
        on_axis: what values are multiplied by to stand on an axis.
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
    """One figure of a run: of a reply, a round, a device, or the whole run, as far as it has readers.

    Attributes:
        name: stable, in snake case; in CSV columns, in summary.json, for exporters.
        title: for people.
        about: what it is, in one sentence.
        unit: see there.
        better: which way is better, where that says by itself who did better (fewer bytes alone do not).
        reply: reads it from a device's reply, as it was in the end.
        predicted: reads what the device had expected of it; None: nobody predicts it.
        over_rounds: sums up one device's replies; a `total` only grows: a counter to an exporter.
        over_devices: sums up the devices of a round or a run.
        round: reads it from a closed round; None: `over_devices` of its replies.
        device, run: read it from summary.json; None: it stands among `metrics` there, if anywhere.
        judges: how well a model does, by the score of the run's task: `seen_as` has its words and its unit.
        shown: where, and what it is called there; "": its title, or the name of a column that it shares.
            In `summary`: among `metrics`, because it has no key of its own.
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
    shown: Mapping[Place, str] = field(default_factory=dict)

    def seen_as(self, score: Score) -> "Metric":
        """As a run says it whose models are judged by `score`."""
        if not self.judges or score == ACCURACY:
            return self
        return replace(
            self,
            title=self.title.replace(ACCURACY.title, score.title),
            about=self.about.replace("Accuracy", _capital(score.title)).replace(ACCURACY.title, score.title),
            unit=gain_of(score) if self.unit is POINTS else unit_of(score),
            better=self.better if self.unit is POINTS else score.better,
            shown={
                place: head.replace("Accuracy", _capital(score.title)).replace(ACCURACY.title, score.title)
                for place, head in self.shown.items()
            },
        )

    @property
    def axis(self) -> str:
        """Beside an axis."""
        return f"{self.title}, {self.unit.sign}" if self.unit.sign else self.title

    def head(self, place: Place) -> str:
        """What it is called there."""
        return self.shown.get(place) or self.title

    def of_reply(self, reply: DeviceRound) -> Value:
        """As it was in the end."""
        return self.reply(reply) if self.reply else None

    def expected_of(self, reply: DeviceRound) -> Value:
        """As the device had predicted it."""
        return self.predicted(reply) if self.predicted else None

    def of_round(self, record: RoundRecord) -> Value:
        """Of a closed round, over its replies."""
        if self.round:
            return self.round(record)
        return self.over_devices(self.of_reply(reply) for reply in record.devices.values())

    def of_replies(self, replies: Iterable[DeviceRound]) -> Value:
        """Of one device, over its rounds."""
        return self.over_rounds(self.of_reply(reply) for reply in replies)

    def of_device(self, row: DeviceSummary) -> Value:
        """Of one device, as summary.json has it."""
        return self.device(row) if self.device else _among(row.metrics, self.name)

    def of_run(self, summary: Summary) -> Value:
        """Of the whole run, as summary.json has it."""
        return self.run(summary) if self.run else _among(summary.metrics, self.name)


def unit_of(score: Score) -> Unit:
    """What a score is measured in."""
    return FRACTION if score.share else NUMBER


def gain_of(score: Score) -> Unit:
    """What a difference of two values of a score is measured in, above 0 where it is for the better."""
    return POINTS if score.share else GAIN_IN_NUMBERS


def titled(score: Score, rest: str) -> str:
    """The title of a picture of a score."""
    return f"{_capital(score.title)} {rest}"


def _capital(title: str) -> str:
    return title[:1].upper() + title[1:]


def _among(metrics: object, name: str) -> Value:
    return metrics.get(name) if isinstance(metrics, dict) else None
