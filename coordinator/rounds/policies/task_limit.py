"""Limits the number of training tasks that each device is asked to do in a run.

A device at its limit takes no further part, like one that left. Training ends when fewer devices than a round
needs can still be asked: `round.participants`, or all of them if that is left out.
"""

from collections.abc import Iterable

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.round import RoundSection


class TaskLimit:
    """Counts tasks and retires the devices that have reached the limit.

    Args:
        most: largest number of tasks of each device; None for no limit.
        reason: why training ends when devices have reached it.
    """

    def __init__(self, most: int | None = None, reason: str = "") -> None:
        self._most, self._reason = most, reason
        self._spent: set[DeviceId] = set()
        self._to_retire: set[DeviceId] = set()

    def recall(self, state: EngineState) -> None:
        """Find the devices at the limit in a stored state."""
        self._note(state, state.members)

    def count(self, state: EngineState, devices: Iterable[DeviceId]) -> None:
        """Count one more training task of each of these devices; the state is stored before it is sent."""
        for device in devices:
            tasks = state.members[device].tasks + 1
            state.put(device, tasks=tasks)
            if tasks > state.most_tasks:
                state.change(most_tasks=tasks)
        self._note(state, devices)

    def retire(self, state: EngineState) -> None:
        """Let devices at the limit leave training. Call it only while no round is open."""
        for device in sorted(self._to_retire):
            if device in state.members:
                state.put(device, left=True)
            else:  # it was forgotten
                self._spent.discard(device)
        self._to_retire.clear()

    def over(self, state: EngineState, settings: RoundSection) -> str | None:
        """Return why no further round may open; None if enough devices can still be asked."""
        staying = len(state.groups.staying)
        if not self._spent or staying >= (settings.participants or staying + len(self._spent)):
            return None
        return self._reason

    def _note(self, state: EngineState, devices: Iterable[DeviceId]) -> None:
        if self._most is None:
            return
        spent = {device for device in devices if state.members[device].tasks >= self._most}
        self._spent |= spent
        self._to_retire |= spent
