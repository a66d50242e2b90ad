"""Read-only view of a run in progress."""

from collections.abc import Mapping
from typing import Any

from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState, Member, RoundAttempt
from fleetune.coordinator.rounds.records import Ledger, RoundRecord
from fleetune.coordinator.rounds.rejections import RejectionReason, rejection_of
from fleetune.coordinator.run.run_parts import RunParts
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.shared_payload_cache import PayloadContent


class RunView:
    """A read-only view of a run's state. `RunController` makes and changes its parts."""

    _engine: RoundEngine
    _run: RunParts

    @property
    def tasks_made(self) -> list[tuple[DeviceId, int, int, float]]:
        """See `Tasks.made`; a killed coordinator loses this list, a simulation does not."""
        return self._run.tasks.made

    @tasks_made.setter
    def tasks_made(self, made: list[tuple[DeviceId, int, int, float]]) -> None:
        self._run.tasks.made = made

    @property
    def content(self) -> PayloadContent | None:
        """Content of the task that was made last, see `Downlink`."""
        return self._run.tasks.content

    def awaited_attempt(self, device: DeviceId) -> RoundAttempt | None:
        """Return round and attempt of the task that the device is expected to answer.

        The result is None if there is none.
        """
        return self._engine.state.awaited_attempt(device)

    def rejection(self, device: DeviceId, round_attempt: RoundAttempt) -> RejectionReason | None:
        """Return why a reply of `device` to `round_attempt` does not count; None if it counts."""
        return rejection_of(self._engine.state, device, round_attempt)

    @property
    def round_attempt(self) -> RoundAttempt:
        """The round and attempt that is open or comes next."""
        return self._engine.state.round_attempt

    @property
    def finished(self) -> str | None:
        """Why the run is over; None while it is not."""
        return self._engine.state.ending.reason if self._engine.finished else None

    @property
    def wake_at(self) -> float | None:
        """Latest time at which `handle(Tick(), now)` is due; None if only another event is awaited."""
        return self._engine.wake_at

    @property
    def is_due(self) -> bool:
        """True if a round is open, or opens as soon as enough devices are ready."""
        state = self._engine.state
        return state.running or state.plan.due or self._engine.schedule.settings.is_free

    @property
    def members(self) -> Mapping[DeviceId, Member]:
        """State of every device that ever contacted the run."""
        return self._engine.state.members

    @property
    def engine_state(self) -> EngineState:
        """The engine's state, to be read only."""
        return self._engine.state

    @property
    def method_state(self) -> Any:
        """The method's state before the plan of the open round."""
        return self._run.method.state

    @property
    def shared_model(self) -> FlatArray:
        """The coordinator's model, shape (spec.size,)."""
        return self._run.method.shared_model

    @property
    def ledger(self) -> Ledger:
        """Counts over the whole run."""
        return self._run.accounts.ledger

    def records(self) -> list[RoundRecord]:
        """Records of all closed rounds, ascending."""
        return self._run.store.records()
