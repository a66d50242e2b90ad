"""A run's method with its state, and the aggregation that turns a round's updates into the next state."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fleetune.coordinator.combine.round_combine import RoundCombine
from fleetune.coordinator.extensions.extension import Extensions, RoundUpdates
from fleetune.coordinator.extensions.update_norms import Sizes, UpdateNorms, not_finite, sizes_of, suspect
from fleetune.coordinator.rounds.events import Aggregated, NotAggregated
from fleetune.coordinator.run.open_round import OpenRound
from fleetune.coordinator.store.method_state import forget_last, read_state, write_state
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.tasks.assignment import Tasks
from fleetune.protocols.errors import MethodError, PacketNotFinite
from fleetune.protocols.freed_memory import LARGE_BYTES
from fleetune.protocols.method import steps
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId, Method, Round
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key

USUAL_RATIO = 100.0  # the default of `round.norm_bound`: float32 overflows at a norm ratio of 1e38

log = logging.getLogger(__name__)


class MethodRun:
    """The method of one run and its state.

    Args:
        method: the method, made for the run's model.
        weights: initial weights, shape (spec.size,).
        store: store of the run; `write` and `forget_last` write to it, inside `store.step()`.

    Attributes:
        state: the method's state before the plan of the open round. Planning again from it after a restart
            gives the same tasks.
        planned: the method's state after that plan; the round's updates are aggregated on it.
    """

    def __init__(self, method: Method[Any, Any, Any, Any], weights: FlatArray, store: RunStore) -> None:
        self.method = method
        self.state: Any = steps.init_coordinator(method, weights)
        self.planned: Any = self.state
        self._store = store
        self._written: Any = None
        self._before: Any = None  # the state before the latest closed round; None if only the store holds it
        self._closes = False  # True if the previous state must be kept when the present one is written

    @property
    def shared_model(self) -> FlatArray:
        """The coordinator's model, shape (spec.size,)."""
        return self.method.shared_model(self.state)

    def recall(self) -> None:
        """Load the state from the store.

        Raises:
            StoreError: the stored state is damaged.
        """
        self.state = self.planned = self._written = self._read()

    def admit(self, report: DeviceReport) -> None:
        """Inform the method about a device."""
        self.state = steps.admit(self.method, self.state, report)

    def plan(self, round_: Round, key: Key) -> Mapping[DeviceId, Any]:
        """Plan a round, or plan it again; return its tasks."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # checked before a task is sent
            self.planned, tasks = steps.plan(self.method, self.state, round_, key)
        return tasks

    def take_over(self, merged: Any) -> None:
        """Make an aggregated state the current state, when its round closes."""
        # a large one is read from the store, should the round be rolled back
        is_large = 4 * self.method.spec.size >= LARGE_BYTES
        self._before, self._closes, self.state = None if is_large else self.state, True, merged

    def roll_back(self) -> None:
        """Restore the state before the latest closed round."""
        self.state, self._before = self._before or self._read(before_last=True), None

    def write(self) -> None:
        """Write the state if it changed."""
        if self.state is self._written:
            return
        write_state(self._store, self.state, self.method.spec, keep_last=self._closes)
        self._written, self._closes = self.state, False

    def forget_last(self) -> None:
        """Drop the state before the last round: a finished run is not rolled back."""
        self._closes = False
        forget_last(self._store)

    def _read(self, *, before_last: bool = False) -> Any:
        kind, spec = self.method.state_type, self.method.spec
        return steps.frozen(read_state(self._store, kind, spec, before_last=before_last))


class Aggregation:
    """Aggregates the updates of a run's rounds.

    Args:
        method: method of the run, with its state.
        extensions: extensions that weight the updates.
        norms: finds the update that caused non-finite numbers.
        tasks: tasks of the open round.
        open_round: replies of the open round.
        combine: combines the updates of each round.
        compares: True if updates may be compared with each other, to find the one that broke a round. With
            central noise they may not: only their noised sum leaves the coordinator.

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
        combine: RoundCombine,
        *,
        compares: bool = True,
    ) -> None:
        self._compares = compares
        self._method, self._extensions, self._norms = method, extensions, norms
        self._tasks, self._open, self._combine = tasks, open_round, combine
        self.merged: Any = None
        self._not_finite: str | None = None  # where the latest state was not finite

    def updates(self, number: int, devices: tuple[DeviceId, ...]) -> Iterator[tuple[DeviceId, Any]]:
        """Yield the updates of these devices for round `number`, weighted by extensions, read one by one."""
        planned, tasks = self._method.planned, self._tasks.planned
        return self._extensions.updates(RoundUpdates(number, devices, planned, tasks, self._open.reply))

    def aggregate(self, number: int, devices: tuple[DeviceId, ...]) -> Aggregated | NotAggregated:
        """Aggregate the updates of these devices into `merged`; return the event for the engine.

        Raises:
            MethodError: `aggregate` failed, or gives non-finite numbers although all updates are of usual
                size.
        """
        sizes: dict[DeviceId, Sizes] = {}
        self.merged = self._aggregated(number, devices, sizes)
        if self.merged is not None:
            return Aggregated(suspect(self._norms.ratios(sizes)))
        if self._not_finite and self._are_usual(sizes, devices):
            title = steps.title(self._method.method, "aggregate")
            raise MethodError(
                f"{title} returns NaN or infinite numbers in {self._not_finite}, though all {len(devices)} "
                "updates are finite and of the model's size"
            )
        suspects = suspect(self._norms.ratios(sizes), least=0.0)
        log.warning(
            "round %d: its updates do not aggregate to finite numbers; %s",
            number,
            f"it goes on without that of {suspects[0]}, the largest" if suspects else "no update stands out",
        )
        return NotAggregated(suspects)

    def _aggregated(
        self, number: int, devices: tuple[DeviceId, ...], sizes: dict[DeviceId, Sizes]
    ) -> Any | None:
        """Return the state after the round, or None if it holds a non-finite number.

        Stores the updates' sizes in `sizes`.
        """

        def noted() -> Iterator[tuple[DeviceId, Any]]:
            for device, update in self.updates(number, devices):
                if self._compares:
                    sizes[device] = sizes_of(update)
                yield device, update
                del update  # before the next one is read

        planned = self._method.planned
        self._not_finite = None
        try:
            with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found below
                combine = self._combine.of_round(planned, devices)
                merged = steps.aggregate(self._method.method, planned, noted(), combine)
        except (np.linalg.LinAlgError, PacketNotFinite):
            return None
        self._not_finite = not_finite(merged, "state", planned)
        return None if self._not_finite else merged

    def _are_usual(self, sizes: Mapping[DeviceId, Sizes], devices: Sequence[DeviceId]) -> bool:
        """True if all updates were measured and no sum of them can overflow."""
        ratios = self._norms.ratios(sizes)
        return len(ratios) == len(devices) and max(ratios.values()) <= USUAL_RATIO
