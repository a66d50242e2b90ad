"""Section [run] of run.toml: the run's name, seed, fleet and number of rounds."""

from typing import Literal

from fleetune.protocols.bounds import FleetName, Int64
from fleetune.protocols.settings.section import Count, Settings


class RunSection(Settings, frozen=True):
    """[run]

    Attributes:
        name: name of the run and of its folder in `runs/`; also the name of the fleet if `fleet` is left out.
        seed: seed of all random draws of the run.
        fleet: name of the fleet whose devices train. If left out, the fleet is called like the run.
        rounds: number of rounds. "open": the run continues until a number is set here (docs/open-runs.md).
        final_evaluation: after the last round every device trains one more round on a copy of the model. The
            run then knows the accuracy before and after local training on all devices.
    """

    name: FleetName
    seed: Int64 = 0
    rounds: Count | Literal["open"] = 10
    final_evaluation: bool = True
    fleet: FleetName | None = None

    @property
    def is_open(self) -> bool:
        """True if the run continues until a number of rounds is set."""
        return self.rounds == "open"

    @property
    def last_round(self) -> int | None:
        """Number of the last round; None in an open run."""
        return None if self.rounds == "open" else self.rounds
