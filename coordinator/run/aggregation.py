"""Aggregation: turns the updates of a closing round into one state of the method."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fleetune.coordinator.extensions.extension import Extensions, RoundUpdates
from fleetune.coordinator.extensions.update_norms import Sizes, UpdateNorms, not_finite, sizes_of, suspect
from fleetune.coordinator.rounds.events import Aggregated, NotAggregated
from fleetune.coordinator.run.method_run import MethodRun
from fleetune.coordinator.run.open_round import OpenRound
from fleetune.coordinator.tasks.assignment import Tasks
from fleetune.protocols.errors import MethodError, PacketNotFinite
from fleetune.protocols.method import steps
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.update.combine import Combine

USUAL_RATIO = 100.0  # the default of `round.norm_bound`: float32 overflows at a norm ratio of 1e38

log = logging.getLogger(__name__)


class Aggregation:
    """Aggregates the updates of a run's rounds.

    Args:
        method: method of the run, with its state.
        extensions: extensions that weight the updates.
        norms: finds the update that caused non-finite numbers.
        tasks: tasks of the open round.
        open_round: replies of the open round.
        combine: rule that combines updates.

    Attributes:
        merged: state after the latest aggregation; None if it held non-finite numbers.
    """

    def __init__(
        self,
        method: MethodRun,
        extensions: Extensions,
        norms: UpdateNorms,
        tasks: Tasks,
        open_round: OpenRound,
        combine: Combine,
    ) -> None:
        self._method, self._extensions, self._norms = method, extensions, norms
        self._tasks, self._open, self._combine = tasks, open_round, combine
        self.merged: Any = None
        self._not_finite: str | None = None  # where the latest state was not finite

    def updates(self, number: int, devices: tuple[DeviceId, ...]) -> Iterator[tuple[DeviceId, Any]]:
        """The updates of these devices for round `number`, weighted by the extensions, read one by one."""
        planned, tasks = self._method.planned, self._tasks.planned
        return self._extensions.updates(RoundUpdates(number, devices, planned, tasks, self._open.reply))

    def aggregate(self, number: int, devices: tuple[DeviceId, ...]) -> Aggregated | NotAggregated:
        """Aggregate the updates of these devices into `merged`. Returns the event for the engine.

        Raises:
            MethodError: `aggregate` failed, or gives non-finite numbers even from each update alone although
                all updates are of usual size.
        """
        sizes: dict[DeviceId, Sizes] = {}
        self.merged = self._aggregated(number, devices, sizes)
        if self.merged is not None:
            return Aggregated(suspect(self._norms.ratios(sizes)))
        place = self._not_finite
        alone = tuple(one for one in devices if self._aggregated(number, (one,), {}) is None)
        if alone == devices and place and self._are_usual(sizes, devices):
            title = steps.title(self._method.method, "aggregate")
            raise MethodError(
                f"{title} returns NaN or infinite numbers in {place}, though all {len(devices)} updates are "
                "finite and of the model's size"
            )
        # No update fails alone, or all do: then the largest is the likely cause.
        if not 0 < len(alone) < len(devices):
            alone = suspect(self._norms.ratios(sizes), least=0.0)
        log.warning(
            "round %d: its updates do not aggregate to finite numbers; %s",
            number,
            f"left out: {', '.join(alone)}" if alone else "no update is the likely reason",
        )
        return NotAggregated(alone)

    def _aggregated(
        self, number: int, devices: tuple[DeviceId, ...], sizes: dict[DeviceId, Sizes]
    ) -> Any | None:
        """The state after the round, or None if it holds a non-finite number. Stores the updates' sizes in
        `sizes`.
        """

        def noted() -> Iterator[tuple[DeviceId, Any]]:
            for device, update in self.updates(number, devices):
                sizes[device] = sizes_of(update)
                yield device, update

        planned = self._method.planned
        self._not_finite = None
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found below
                merged = steps.aggregate(self._method.method, planned, noted(), self._combine)
        except (np.linalg.LinAlgError, PacketNotFinite):
            return None
        self._not_finite = not_finite(merged, "state", planned)
        return None if self._not_finite else merged

    def _are_usual(self, sizes: Mapping[DeviceId, Sizes], devices: Sequence[DeviceId]) -> bool:
        """True if all updates were measured and no sum of them can overflow."""
        ratios = self._norms.ratios(sizes)
        return len(ratios) == len(devices) and max(ratios.values()) <= USUAL_RATIO
