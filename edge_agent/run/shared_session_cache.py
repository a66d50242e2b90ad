"""What sessions that run one after the other in one process remember for each other."""

from dataclasses import dataclass, field
from typing import Self

from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update.base import KnownBases, num_remembered
from fleetune.protocols.update.once import ReadBefore


@dataclass(frozen=True)
class SharedSessionCache:
    """Values that were read or decoded before. Simulated devices receive the same ones over and over.

    Attributes:
        bases: that tasks were written with.
        tasks: whose values were read.
    """

    bases: KnownBases = field(default_factory=KnownBases)
    tasks: ReadBefore = field(default_factory=ReadBefore)

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """That remembers as many bases of the model as there is room for."""
        return cls(KnownBases(num_remembered(spec)))
