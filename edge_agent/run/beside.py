"""What sessions that are played one after the other in one process remember for each other."""

from dataclasses import dataclass, field

from fleetune.protocols.update.base import KnownBases
from fleetune.protocols.update.once import ReadBefore


@dataclass(frozen=True)
class Beside:
    """Simulated devices are sent much alike, by nobody who could have damaged it.

    Attributes:
        bases: that tasks were written with.
        tasks: whose values were read.
    """

    bases: KnownBases = field(default_factory=KnownBases)
    tasks: ReadBefore = field(default_factory=ReadBefore)
