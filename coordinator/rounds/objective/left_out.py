"""What rounds have shown of encodings: how much of a change each leaves for a later update.

What waits is not there when it would help, so an update is worth less to the others by as much as its
encoding leaves out (`EncodingCost.fidelity`). How much that is depends on model and masks, and grows while a
run goes on: what waited once waits again. So devices tell it with each reply, and the median of those that
were asked for the same encoding in a round counts.

Nobody can look that up in what arrived. A device that lies moves the median of honest ones by no more than
one of them would; alone with its encoding it can make that seem to leave out all or nothing, which is worth
`encoding.SLOWING` at most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median

from fleetune.protocols.update.encodings.encoding import EncodingCost

NEWEST = 0.2  # what the last round counts in a mean
FADING = 0.02  # of what nobody has told lately: what is asked for no more may be better by now


@dataclass(frozen=True)
class LeftOut:
    """Of changes, by the run's encodings of updates.

    Attributes:
        shares: by number of the encoding, the mean over rounds, newer ones counting more; None: nobody told.
    """

    shares: tuple[float | None, ...] = ()

    def after(self, told: Mapping[int, Sequence[float]], uplinks: Sequence[EncodingCost]) -> "LeftOut":
        """What is known after a round in which devices told this of these encodings."""
        return LeftOut(
            tuple(
                _mean(before, told.get(number, ()), cost.left_out)
                for number, (cost, before) in enumerate(self._by_uplink(uplinks))
            )
        )

    def fidelities(self, uplinks: Sequence[EncodingCost]) -> tuple[float, ...]:
        """Of each of the run's encodings, see `EncodingCost`; as usual where nobody told."""
        return tuple(cost.fidelity(share) for cost, share in self._by_uplink(uplinks)) or (1.0,)

    def _by_uplink(self, uplinks: Sequence[EncodingCost]) -> list[tuple[EncodingCost, float | None]]:
        return list(zip_longest(uplinks, self.shares[: len(uplinks)]))


def _mean(before: float | None, told: Sequence[float], usual: float) -> float | None:
    if told:
        now = median(told)
        return now if before is None else before + NEWEST * (now - before)
    return None if before is None else before + FADING * (usual - before)
