"""A cache for sessions that run one after the other in one process."""

from dataclasses import dataclass, field
from typing import Self

from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update.base import KnownBases, num_remembered
from fleetune.protocols.update.once import ReadBefore


@dataclass(frozen=True)
class SharedSessionCache:
    """Caches decoded values, because simulated devices receive the same ones many times.

    Attributes:
        bases: models that tasks are differences to.
        tasks: tasks whose values were decoded.
    """

    bases: KnownBases = field(default_factory=KnownBases)
    tasks: ReadBefore = field(default_factory=ReadBefore)

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Make a cache with room for as many base models as memory allows."""
        return cls(KnownBases(num_remembered(spec)))
