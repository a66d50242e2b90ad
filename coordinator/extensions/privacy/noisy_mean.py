"""Adds the noise of [privacy] to a round's sum of updates, where the coordinator adds it."""

from dataclasses import dataclass

from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.private_noise import Draw
from fleetune.protocols.settings.privacy import PrivacySection
from fleetune.protocols.update.combine import Combination, CoveredMean
from fleetune.protocols.update.patch import Patch

_CHUNK = 2**15  # entries at a time


@dataclass(frozen=True)
class NoisyMean:
    """A combine rule: the mean, with normal noise added to the sum before it is divided.

    Every update must have the weight 1 and a clipped step. Then one device changes the sum by at most the
    clipping norm, whatever entries the others send.

    Attributes:
        deviation: standard deviation of the noise of each entry of the sum.
        draw: draws the noise.
    """

    deviation: float
    draw: Draw

    def __call__(self, spec: ModelSpec) -> Combination:
        return _NoisySum(spec, self)


class _NoisySum:
    def __init__(self, spec: ModelSpec, rule: NoisyMean) -> None:
        self._mean, self._rule = CoveredMean(spec), rule

    def add(self, patch: Patch, weight: float) -> None:
        if weight != 1:
            raise ValueError(f"an update counts {weight:g} times; with [privacy] each must count once")
        self._mean.add(patch, weight)

    def over(self, previous: FlatArray) -> FlatArray:
        sums = self._mean.sums
        for first in range(0, sums.size, _CHUNK):
            part = sums[first : first + _CHUNK]
            part += self._rule.deviation * self._rule.draw(part.size, first)
        return self._mean.over(previous)  # entries that no update has come from `previous`, without noise


def noisy_mean(section: PrivacySection, draw: Draw) -> NoisyMean:
    """Return the combine rule of a run whose coordinator adds the noise."""
    return NoisyMean(section.noise_multiplier * section.clip, draw)
