"""A run's method and its state: planning, aggregation, roll-back, storage."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fleetune.coordinator.store.method_state import forget_last, read_state, write_state
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.method import steps
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId, Method, Round
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key


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
        """Plan a round, or plan it again. Returns its tasks."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # checked before a task is sent
            self.planned, tasks = steps.plan(self.method, self.state, round_, key)
        return tasks

    def take_over(self, merged: Any) -> None:
        """Make an aggregated state the current state, when its round closes."""
        self._before, self._closes, self.state = self.state, True, merged

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
