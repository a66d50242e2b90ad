"""The norm bound: an update that is far larger than the model and the other updates is refused."""

from typing import Self

from fleetune.coordinator.extensions.extension import Arrival, Extension, RunContext
from fleetune.coordinator.extensions.update_norms import UpdateNorms, sizes_of
from fleetune.protocols.errors import PacketOutlying


class NormBound(Extension):
    """Refuses an update whose norm ratio is above the limit.

    Args:
        limit: `round.norm_bound`, the greatest norm ratio; 0: any.
        norms: of the run.
    """

    def __init__(self, limit: float, norms: UpdateNorms) -> None:
        self._limit, self._norms = limit, norms

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        section = run.settings.privacy
        # clipping bounds each step, and a bound by the other updates would let them decide which one counts
        clips = section is not None and not section.is_local
        return cls(0 if clips else run.settings.round.norm_bound, run.norms)

    def check(self, arrival: Arrival) -> None:
        """Check the numbers of an update that counts.

        Raises:
            PacketNotFinite: a single figure is NaN or infinite.
            PacketOutlying: the update is larger than the limit allows.
        """
        update = arrival.reply.update
        if not arrival.counts or update is None:
            return
        sizes = sizes_of(update)
        if not self._limit or self._norms.ratio(sizes, []).times <= self._limit:
            return
        # The other updates are read again only now: an honest round never needs them.
        ratio = self._norms.ratio(sizes, [sizes_of(other) for other in arrival.others()])
        if ratio.times > self._limit:
            raise PacketOutlying(
                f"its {ratio.what} is {ratio.size:.3g}, {ratio.times:.3g} times that of the shared model "
                f"or of the other updates ({ratio.reference:.3g}); round.norm_bound = {self._limit:g}"
            )
