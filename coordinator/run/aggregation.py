"""A round's updates made one state, and what it comes to when they do not make one."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from fleetune.coordinator.rounds.engine_state import Turn
from fleetune.coordinator.rounds.rollback import Verdict
from fleetune.coordinator.run.partial_updates import Normalising
from fleetune.coordinator.run.reply_checks import Scrutiny, Sizes, not_finite, sizes_of, telling
from fleetune.protocols.errors import MethodError, PacketNotFinite
from fleetune.protocols.method import steps
from fleetune.protocols.method.max_share import MAX_SHARE, samples_cut
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.method.staleness import staleness_factor
from fleetune.protocols.wire.payloads import Reply

USUAL_STRAIN = 100.0  # the default of `round.max_strain`: float32 overflows at a strain of 1e38

log = logging.getLogger(__name__)


@dataclass
class Aggregating:
    """Aggregates the replies of an open round.

    Attributes:
        method: of the run.
        scrutiny: of its updates.
        staleness_power: see [round].
        reply_of: a device's reply in the open round, to be changed.
        planned: the method's state after the plan of the open round.
        normalising: of updates, where devices may do a share of the local training; None: all do all of it.
        max_share: see [round].
        samples: behind each reply in the open round, by device, as far as they were noted.
        merged: the state after the round that was judged last; None: it did not come to finite numbers.
        cut: the updates in `merged` that count as fewer samples than they claim, with these samples.
    """

    method: Method[Any, Any, Any, Any]
    scrutiny: Scrutiny
    staleness_power: float
    reply_of: Callable[[DeviceId], Reply[Any]]
    planned: Any
    normalising: Normalising | None = None
    max_share: float = MAX_SHARE
    samples: dict[DeviceId, int] = field(default_factory=dict)
    merged: Any = field(default=None, init=False)
    cut: dict[DeviceId, int] = field(default_factory=dict, init=False)
    _not_finite: str | None = field(default=None, init=False)  # where the latest state was not

    def note(self, reply: Reply[Any]) -> None:
        """Note the samples behind a reply, so that it need not be read for them."""
        update: Any = reply.update
        has_samples = any(one.name == "num_samples" for one in fields(update))
        self.samples[reply.device] = update.num_samples if has_samples else 0

    def updates(self, number: int, devices: tuple[DeviceId, ...]) -> Iterator[tuple[DeviceId, Any]]:
        """Of these devices, for round `number`; stale ones discounted, those of less local training moved
        as if all had done the same.
        """
        mean_share = 1.0 if self.normalising is None else self.normalising.mean_share(devices)
        for device in devices:
            reply = self.reply_of(device)
            update, staleness = reply.update, number - reply.round
            if staleness:
                factor = staleness_factor(staleness, self.staleness_power)
                update = self.method.discount(self.planned, update, factor)
            if self.normalising is not None:
                self.normalising.apply(reply, mean_share)
            yield device, update

    def judge(self, turn: Turn, devices: tuple[DeviceId, ...]) -> Verdict:
        """Whether the round comes to finite numbers; then it is in `merged`.

        Raises:
            MethodError: `aggregate` failed; or it gives numbers that are not finite even from each update
                alone, and all of these are of a usual size, so that the method is the reason.
        """
        sizes: dict[DeviceId, Sizes] = {}
        self.merged = self._aggregated(turn.number, devices, sizes)
        if self.merged is not None:
            return Verdict(True, telling(self.scrutiny.strains(sizes)))
        place = self._not_finite
        alone = tuple(one for one in devices if self._aggregated(turn.number, (one,), {}) is None)
        if alone == devices and place and self._are_usual(sizes, devices):
            raise MethodError(
                f"{steps.title(self.method, 'aggregate')} returns NaN or infinite numbers in {place}, though "
                f"all {len(devices)} updates are finite and of the model's size"
            )
        if not 0 < len(alone) < len(devices):  # then the largest is thought to be the reason
            alone = telling(self.scrutiny.strains(sizes), least=0.0)
        log.warning(
            "round %d: its updates do not aggregate to finite numbers; %s",
            turn.number,
            f"left out: {', '.join(alone)}" if alone else "nobody is told to be the reason",
        )
        return Verdict(False, alone)

    def _cut(self, devices: tuple[DeviceId, ...]) -> dict[DeviceId, int]:
        """The samples that updates count as, of those whose share in the mean is cut."""
        if self.max_share == 1 or not self.method.weighs_by_samples:
            return {}
        for device in devices:
            if device not in self.samples:  # noted by a process that is gone
                self.note(self.reply_of(device))
        return samples_cut({device: self.samples[device] for device in devices}, self.max_share)

    def _aggregated(
        self, number: int, devices: tuple[DeviceId, ...], sizes: dict[DeviceId, Sizes]
    ) -> Any | None:
        """The state after the round, None if a number in it is not finite; the updates' `sizes` are noted."""
        cut = self.cut = self._cut(devices)

        def noted() -> Iterator[tuple[DeviceId, Any]]:
            for device, update in self.updates(number, devices):
                sizes[device] = sizes_of(update)
                yield device, replace(update, num_samples=cut[device]) if device in cut else update

        self._not_finite = None
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found below
                merged = steps.aggregate(self.method, self.planned, noted())
        except (np.linalg.LinAlgError, PacketNotFinite):
            return None
        self._not_finite = not_finite(merged, "state", self.planned)
        return None if self._not_finite else merged

    def _are_usual(self, sizes: Mapping[DeviceId, Sizes], devices: Sequence[DeviceId]) -> bool:
        """Whether all updates were looked at, and no sum of them can overflow."""
        strains = self.scrutiny.strains(sizes)
        return len(strains) == len(devices) and max(strains.values()) <= USUAL_STRAIN
