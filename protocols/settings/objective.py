"""Section [objective] of run.toml: the cost that a run minimises on its way to an accuracy."""

from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.encoding import Choice, check_encodings
from fleetune.protocols.settings.section import Settings

Share = Annotated[float, Meta(gt=0, le=1)]
Amount = Annotated[float, Meta(gt=0)]
Price = Annotated[float, Meta(ge=0, le=1e9)]


class WithinSection(Settings, frozen=True):
    """[objective.within] The run's budget; in one line: within = { ... }

    Attributes:
        seconds: time since the first round started, on the coordinator's clock.
        megabytes: bytes of the updates that devices send, in MB.
        joules: energy that devices report for their rounds, without idle time between rounds.
    """

    seconds: Amount | None = None
    megabytes: Amount | None = None
    joules: Amount | None = None


class PriceSection(Settings, frozen=True):
    """[objective.price] Prices in any currency; in one line: price = { ... }

    Attributes:
        megabyte: price of a megabyte of updates.
        kilowatt_hour: price of a kilowatt hour that devices draw.
    """

    megabyte: Price = 0.0
    kilowatt_hour: Price = 0.0


class ObjectiveSection(Settings, frozen=True):
    """[objective]

    Attributes:
        minimise: what the run minimises until its models are good. The coordinator proposes each task's
            ratio, share of the local training and encoding, among those that its device can afford. It
            plans for the most utility a second (`time`; a round ends after `deadline_slack` times its
            target duration, as with `round.deadline = "predicted"`), a byte sent, a joule (idle boards
            included, if devices report their idle power) or a unit of `price` (`money`). `none`: each
            device takes the largest ratio that fits.
        at_most: no larger ratio is proposed.
        least_work: the smallest share of a round's local training that is proposed, for stragglers and for
            devices that could not take part otherwise; 1: all devices do all of it.
        most_work: the largest multiple of the local training, for devices with time left: 2 is twice the
            run's epochs.
        encodings: of updates, besides `encoding.up`; proposed if they take fewer bytes and that pays. []
            leaves all devices at `encoding.up`.
        normalise: weigh updates of devices with less local training as if all had done the same (FedNova);
            only for methods whose devices start from their task's weights.
        late: share of a device's rounds that may exceed the deadline. A ratio fits only if all other rounds,
            by the errors of past forecasts, would be in time; 1: if the forecast is. The smallest ratio needs
            no safety margin.
        within: the run's budget; it ends before the round that would exceed it.
        price: of what devices use, for `minimise = "money"`.
    """

    minimise: Literal["none", "time", "bytes", "energy", "money"] = "none"
    at_most: Share = 1.0
    least_work: Share = 0.25
    most_work: Annotated[float, Meta(ge=1, le=4)] = 1.0
    encodings: Annotated[tuple[Choice, ...], Meta(max_length=8)] = (
        "int4",
        {"name": "lowrank", "step": 1},
        "lowrank",
    )
    normalise: bool = False
    late: Share = 0.05
    within: WithinSection = WithinSection()
    price: PriceSection = PriceSection()

    def __post_init__(self) -> None:
        if self.minimise == "money" and self.price == PriceSection():
            raise SettingError(
                'objective.minimise = "money": set objective.price, of a megabyte or a kilowatt hour'
            )
        check_encodings(self.encodings)

    @property
    def proposes(self) -> bool:
        """True if the coordinator proposes the ratio of each task."""
        return self.minimise != "none"
