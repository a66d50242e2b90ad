"""A whole run.toml: everything needed to repeat a run; `protocols.settings.run_toml` reads it.

Its sections stand by who heeds them: device.py, coordinator.py, simulation.py.
"""

from typing import Any

from msgspec import field

from fleetune.protocols.bounds import FleetName
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.settings.coordinator import RoundSection, RunSection
from fleetune.protocols.settings.device import DataSection, ModelSection, TrainingSection
from fleetune.protocols.settings.encoding import Choice, EncodingSection
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.schedule import ScheduleSection
from fleetune.protocols.settings.section import Settings
from fleetune.protocols.settings.simulation import FleetSection, PaperSection, Partition
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.update.encodings import chosen


class RunSettings(Settings, frozen=True):
    """A whole run.toml.

    Attributes:
        compare: [compare.LABEL] tables for `edge-sim compare`: what [method] would hold for the configuration
            LABEL; without a `name` LABEL is the method; `ratios` goes to [fleet] instead, `up` and `down` to
            [encoding], `minimise` to [objective]. A run ignores them.
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
    objective: ObjectiveSection = ObjectiveSection()
    schedule: ScheduleSection = ScheduleSection()
    fleet: FleetSection = FleetSection()
    compare: dict[FleetName, dict[str, Any]] = field(default_factory=dict)
    paper: PaperSection | None = None

    @property
    def proposes_ratios(self) -> bool:
        """Whether the coordinator proposes each task's ratio; never where `fleet.ratios` deals them."""
        return self.objective.proposes and not self.fleet.ratios

    @property
    def time_counts(self) -> bool:
        """Whether it proposes them so that the run takes little time or energy."""
        return self.proposes_ratios and self.objective.minimise in ("time", "energy")

    @property
    def compact(self) -> bool:
        """Whether what is said around the values is to take few bytes, see `EncodingSection`."""
        asked = self.encoding.compact
        return self.proposes_ratios and self.objective.minimise == "bytes" if asked is None else asked

    @property
    def quick_masks(self) -> bool:
        """Whether devices' time counts where masks are written, see `EncodingSection`."""
        return self.time_counts if self.encoding.quick_masks is None else self.encoding.quick_masks

    @property
    def uplinks(self) -> tuple[Choice, ...]:
        """How a task may ask for the values of its update: `encoding.up`, and those that are proposed beside
        it, the one of fewest bytes last.
        """
        if not self.proposes_ratios:
            return (self.encoding.up,)
        sizes = {chosen(one).cost.bytes_per_value: one for one in self.objective.encodings}
        own = self.encoding.uplink.cost.bytes_per_value
        return self.encoding.up, *(sizes[size] for size in sorted(sizes, reverse=True) if size < own)


def simulated_keys(settings: RunSettings) -> list[str]:
    """What a run.toml says about a simulated world, and a real fleet brings itself: `serve` names these keys,
    and nothing else in the file but [compare] and [paper] means less to it than to a simulation.
    """
    fleet, plain = settings.fleet, FleetSection()
    keys = [key for key in fleet.__struct_fields__ if key != "ratios" and (fleet.devices or key != "devices")]
    said = [f"fleet.{key}" for key in keys if getattr(fleet, key) != getattr(plain, key)]
    data = settings.data
    said += ["data.partition"] * (data.partition != Partition())
    return said + ["data.arrivals"] * (data.arrivals is not None)
