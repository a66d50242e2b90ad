"""run.toml's [objective]: what a run is to take least of on its way to an accuracy."""

from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.encoding import Choice, check_encodings
from fleetune.protocols.settings.section import Settings

Share = Annotated[float, Meta(gt=0, le=1)]
Amount = Annotated[float, Meta(gt=0)]
Price = Annotated[float, Meta(ge=0, le=1e9)]


class WithinSection(Settings, frozen=True):
    """[objective.within] or within = { ... }

    Attributes:
        seconds: from the first round on, by the coordinator's clock; no round opens that would take longer.
        megabytes: likewise, of updates that devices send.
        joules: likewise, that they draw for their rounds, as far as they tell; waiting between is not in it.
    """

    seconds: Amount | None = None
    megabytes: Amount | None = None
    joules: Amount | None = None


class PriceSection(Settings, frozen=True):
    """[objective.price] or price = { ... }, in any currency

    Attributes:
        megabyte: of updates that devices send.
        kilowatt_hour: that they draw.
    """

    megabyte: Price = 0.0
    kilowatt_hour: Price = 0.0


class ObjectiveSection(Settings, frozen=True):
    """[objective]

    Attributes:
        minimise: what a run is to take least of until it is good. The coordinator proposes each task's ratio,
            and how much of the local training, among those that its device can afford: so that rounds are as
            short as it pays (`time`; each is then over after `deadline_slack` times what its devices expect
            of it, as with `round.deadline = "predicted"`), or so that a byte sent, a joule (drawn while
            waiting, too, where devices say that) or a unit of `price` brings most. `none`: each device takes
            the largest ratio that fits.
        at_most: no larger ratio is proposed.
        least_work: the smallest share of a round's local training that is proposed, to those that would hold
            up the others or could not take part at all; 1: all do all of it.
        most_work: the most of it, for those that have time left: 2 is twice the run's epochs.
        encodings: of updates, beside `encoding.up`: those of them that take fewer bytes than it are proposed,
            too, where that pays. [] leaves all devices at `encoding.up`.
        normalise: updates of devices that did less of the local training count as if all had done the same
            (FedNova); methods whose devices do not start from what their task brings are left as they are.
        late: share of a device's rounds that may take longer than the deadline: a ratio fits only where all
            but these, by what past rounds took, would be in time. 1: where what is expected is in time. A
            device's smallest ratio fits so in any case.
        within: what the run may take; it ends before the round that would go beyond.
        price: of what devices take, for `minimise = "money"`.
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
            raise SettingError('objective.minimise = "money": say objective.price, of a megabyte or a kWh')
        check_encodings(self.encodings)

    @property
    def proposes(self) -> bool:
        """Whether the coordinator proposes ratios."""
        return self.minimise != "none"
