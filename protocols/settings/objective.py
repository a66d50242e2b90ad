"""Section [objective] of run.toml: the cost that a run minimises on its way to an accuracy."""

from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.settings.encoding import Choice, check_encodings
from fleetune.protocols.settings.section import Settings

Share = Annotated[float, Meta(gt=0, le=1)]


class ObjectiveSection(Settings, frozen=True):
    """[objective]

    Attributes:
        minimise: what the run minimises until its models reach their accuracy. The coordinator proposes for
            each task a ratio, a share of the local training and an encoding that the device can afford. It
            maximises the utility per second (`time`; a round ends after `round.deadline_slack` times its
            target duration), per byte sent (`bytes`) or per joule (`energy`; including boards that wait, if
            devices report their idle power). `none`: each device uses the largest ratio that fits its
            limits.
        at_most: largest ratio that is proposed.
        least_work: smallest share of a round's local training that is proposed, for stragglers and for
            devices that could not take part otherwise. 1: every device does all of the local training.
        most_work: largest multiple of the local training, for devices with time left. 2 is twice the run's
            epochs.
        encodings: encodings of updates that are proposed besides `encoding.up`, where they need fewer bytes
            and that lowers the cost. []: all devices use `encoding.up`.
        late: share of a device's rounds that may exceed the deadline. A ratio fits only if all other rounds
            would be in time, judged by the errors of past forecasts. 1: a ratio fits if its forecast is in
            time. The smallest ratio needs no safety margin.
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
