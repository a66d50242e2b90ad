"""A whole run.toml: all that is needed to repeat a run. `protocols.settings.run_toml` reads the file.

`device` has the sections that devices use, and `simulation` those of simulations. Other sections have a file
each.
"""

from typing import Any

from msgspec import field

from fleetune.protocols.bounds import FleetName
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.settings.device import DataSection, ModelSection, TrainingSection
from fleetune.protocols.settings.encoding import Choice, EncodingSection
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.privacy import PrivacySection
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.run import RunSection
from fleetune.protocols.settings.schedule import ScheduleSection
from fleetune.protocols.settings.section import Settings
from fleetune.protocols.settings.simulation import FleetSection, PaperSection, Partition
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.update.encodings import chosen


class RunSettings(Settings, frozen=True):
    """A whole run.toml.

    Attributes:
        compare: tables [compare.LABEL] for `edge-sim compare`, one for each compared configuration. A table
            replaces [method]; without a `name` the label is the method. `ratios` goes to [fleet], `up` and
            `down` to [encoding], and `minimise` to [objective]. A run ignores these tables.
        paper: see `PaperSection`.
    """

    run: RunSection
    model: ModelSection
    method: dict[str, Any]
    data: DataSection = DataSection()
    task: TaskSection = TaskSection()
    training: TrainingSection = TrainingSection()
    adoption: AdoptionSection = AdoptionSection()
    encoding: EncodingSection = EncodingSection()
    round: RoundSection = RoundSection()
    privacy: PrivacySection | None = None
    objective: ObjectiveSection = ObjectiveSection()
    schedule: ScheduleSection = ScheduleSection()
    fleet: FleetSection = FleetSection()
    compare: dict[FleetName, dict[str, Any]] = field(default_factory=dict)
    paper: PaperSection | None = None

    @property
    def proposes_ratios(self) -> bool:
        """True if the coordinator proposes the ratio of each task; never if `fleet.ratios` assigns them."""
        return self.objective.proposes and not self.fleet.ratios

    @property
    def time_counts(self) -> bool:
        """True if the coordinator proposes ratios that save time or energy."""
        return self.proposes_ratios and self.objective.minimise in ("time", "energy")

    @property
    def compact(self) -> bool:
        """True if messages and update frames are compact, see `EncodingSection`."""
        asked = self.encoding.compact
        return self.proposes_ratios and self.objective.minimise == "bytes" if asked is None else asked

    @property
    def quick_masks(self) -> bool:
        """True if the time for coding a mask counts, see `EncodingSection`."""
        return self.time_counts if self.encoding.quick_masks is None else self.encoding.quick_masks

    @property
    def uplinks(self) -> tuple[Choice, ...]:
        """The encodings that a task may request for its update.

        `encoding.up` comes first, then the smaller ones of `objective.encodings`, by descending size.
        """
        if not self.proposes_ratios:
            return (self.encoding.up,)
        sizes = {chosen(one).cost.bytes_per_value: one for one in self.objective.encodings}
        own = self.encoding.uplink.cost.bytes_per_value
        return self.encoding.up, *(sizes[size] for size in sorted(sizes, reverse=True) if size < own)


def simulated_keys(settings: RunSettings) -> list[str]:
    """Return the keys of a run.toml that describe a simulated fleet and that `serve` therefore ignores.

    `serve` names them in a warning. [compare] and [paper] are not among them.
    """
    fleet, plain = settings.fleet, FleetSection()
    keys = [key for key in fleet.__struct_fields__ if key != "ratios" and (fleet.devices or key != "devices")]
    said = [f"fleet.{key}" for key in keys if getattr(fleet, key) != getattr(plain, key)]
    data = settings.data
    said += ["data.partition"] * (data.partition != Partition())
    return said + ["data.arrivals"] * (data.arrivals is not None)
