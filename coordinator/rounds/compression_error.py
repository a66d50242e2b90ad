"""Estimates the compression error of each update encoding from the devices' measurements during a run.

An encoding that sends less than the whole change leaves a residual for a later update (error feedback). Until
then the update lacks the residual, so it has less utility (`EncodingCost.utility_factor`). The error depends
on the model and the masks, and grows during a run. So each device reports its error with its reply. The
coordinator takes the median over the devices that used the same encoding in a round.

The coordinator cannot check such a report. A false report moves the median no further than one honest report
does. A device that is the only one with its encoding can change that encoding's factor within
`encoding.SLOWING`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from fleetune.protocols.update.encodings.encoding import EncodingCost

NEWEST = 0.2  # weight of the latest round in the running mean
FADING = 0.02  # per round without a report: the error of an unused encoding may have fallen since


@dataclass(frozen=True)
class CompressionErrors:
    """The measured compression error of each of the run's encodings of updates.

    Attributes:
        shares: a running mean over rounds, by the encoding's number; None until one is reported.
    """

    shares: tuple[float | None, ...] = ()

    def after(
        self, reported: Mapping[int, Sequence[float]], uplinks: Sequence[EncodingCost]
    ) -> "CompressionErrors":
        """Return the errors after a round; `reported` has the devices' reports by the encoding's number."""
        return CompressionErrors(
            tuple(
                _mean(before, reported.get(number, ()), cost.compression_error)
                for number, (cost, before) in enumerate(self._by_uplink(uplinks))
            )
        )

    def utility_factors(self, uplinks: Sequence[EncodingCost]) -> tuple[float, ...]:
        """Return `EncodingCost.utility_factor` of each encoding; an unreported error is replaced by the usual
        one.
        """
        return tuple(cost.utility_factor(share) for cost, share in self._by_uplink(uplinks)) or (1.0,)

    def _by_uplink(self, uplinks: Sequence[EncodingCost]) -> list[tuple[EncodingCost, float | None]]:
        return list(zip_longest(uplinks, self.shares[: len(uplinks)]))


def _mean(before: float | None, reported: Sequence[float], usual: float) -> float | None:
    if reported:
        now = median(reported)
        return now if before is None else before + NEWEST * (now - before)
    return None if before is None else before + FADING * (usual - before)
