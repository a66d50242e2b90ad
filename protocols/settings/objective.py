"""Section [objective] of run.toml: the cost that a run minimises on its way to an accuracy."""

from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.settings.encoding import Choice, check_encodings
from fleetune.protocols.settings.section import Settings

Share = Annotated[float, Meta(gt=0, le=1)]


class ObjectiveSection(Settings, frozen=True):
    """[objective]

    Attributes:
        minimise: what the run minimises until its models are good. The coordinator proposes each task's
            ratio, share of the local training and encoding, among those that its device can afford. It
            plans for the most utility a second (`time`; a round ends after `round.deadline_slack` times its
            target duration), a byte sent (`bytes`) or a joule (`energy`; idle boards included, if devices
            report their idle power). `none`: each device takes the largest ratio that fits.
        at_most: no larger ratio is proposed.
        least_work: the smallest share of a round's local training that is proposed, for stragglers and for
            devices that could not take part otherwise; 1: all devices do all of it.
        most_work: the largest multiple of the local training, for devices with time left: 2 is twice the
            run's epochs.
        encodings: of updates, besides `encoding.up`; proposed if they take fewer bytes and that pays. []
            leaves all devices at `encoding.up`.
        late: share of a device's rounds that may exceed the deadline. A ratio fits only if all other rounds,
            by the errors of past forecasts, would be in time; 1: if the forecast is. The smallest ratio needs
            no safety margin.
    """

    minimise: Literal["none", "time", "bytes", "energy"] = "none"
    at_most: Share = 1.0
    least_work: Share = 0.25
    most_work: Annotated[float, Meta(ge=1, le=4)] = 1.0
    encodings: Annotated[tuple[Choice, ...], Meta(max_length=8)] = (
        "int4",
        {"name": "lowrank", "step": 1},
        "lowrank",
    )
    late: Share = 0.05

    def __post_init__(self) -> None:
        check_encodings(self.encodings)

    @property
    def proposes(self) -> bool:
        """True if the coordinator proposes the ratio of each task."""
        return self.minimise != "none"
