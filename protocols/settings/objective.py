"""run.toml's [objective]: what a run is to take least of on its way to an accuracy."""

from typing import Annotated, Literal

from msgspec import Meta

from fleetune.protocols.settings.section import Settings

Share = Annotated[float, Meta(gt=0, le=1)]
Amount = Annotated[float, Meta(gt=0)]


class WithinSection(Settings, frozen=True):
    """[objective.within] or within = { ... }

    Attributes:
        seconds: from the first round on, by the coordinator's clock; no round opens that would take longer.
        megabytes: likewise, of updates that devices send.
        joules: likewise, that they draw, as far as they tell.
    """

    seconds: Amount | None = None
    megabytes: Amount | None = None
    joules: Amount | None = None


class ObjectiveSection(Settings, frozen=True):
    """[objective]

    Attributes:
        minimise: what a run is to take least of until it is good. With `time` or `energy` the coordinator
            proposes each task's ratio, among those that its device can afford: so that rounds are as short
            as it pays, or so that a joule brings most. `none`: each device takes the largest ratio that fits.
        at_most: no larger ratio is proposed.
        within: what the run may take; it ends before the round that would go beyond.
    """

    minimise: Literal["none", "time", "energy"] = "none"
    at_most: Share = 1.0
    within: WithinSection = WithinSection()

    @property
    def proposes(self) -> bool:
        """Whether the coordinator proposes ratios."""
        return self.minimise != "none"
