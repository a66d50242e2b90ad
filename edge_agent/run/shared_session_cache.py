"""A cache for sessions that run one after the other in one process."""

from dataclasses import dataclass, field
from typing import Self

from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update.reference_model import ReferenceModelCache, num_remembered
from fleetune.protocols.update.shared_payload_cache import DecodeCache


@dataclass(frozen=True)
class SharedSessionCache:
    """Caches decoded values, because many simulated devices receive the same values.

    Attributes:
        bases: models to which tasks are differences.
        tasks: tasks whose values were decoded.
    """

    bases: ReferenceModelCache = field(default_factory=ReferenceModelCache)
    tasks: DecodeCache = field(default_factory=DecodeCache)

    @classmethod
    def of(cls, spec: ModelSpec) -> Self:
        """Return a cache with space for as many reference models as memory allows."""
        return cls(ReferenceModelCache(num_remembered(spec)))
