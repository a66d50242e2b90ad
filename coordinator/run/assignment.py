"""The tasks of the open round: made when they are sent, and fit for that."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from fleetune.coordinator.rounds.engine_state import Turn
from fleetune.coordinator.rounds.events import Declined
from fleetune.coordinator.run.reply_checks import not_finite
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import PacketNotFinite
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.skeletons.method import DeviceId
from fleetune.protocols.update import codec
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Assignment
from fleetune.protocols.wire.release import Release


@dataclass(frozen=True)
class OutgoingTask:
    """A task to be carried to its device: the payload that `make` returns, made when it is sent, not before.

    `make` raises PacketNotFinite when the task is not fit to be sent; then tell the run controller
    `declined`.
    """

    device: DeviceId
    transfer_key: TransferKey
    make: Callable[[], bytes]

    def declined(self, problem: PacketNotFinite) -> Declined:
        """As if the device had tried it."""
        return Declined(
            self.device, self.transfer_key.round, self.transfer_key.attempt, str(problem), diverged=True
        )


@dataclass
class Tasks:
    """Planned tasks as they are sent.

    Attributes:
        store: of the run.
        spec: its model.
        kind: of the method's tasks.
        outlive: semi-asynchronously tasks outlive the state they were planned on, so they are kept as sent.
        planned: of the open round, by participant.
        release: which version of the shared model a device may serve; None: the run has no roll-out.
    """

    store: RunStore
    spec: ModelSpec
    kind: type
    outlive: bool
    planned: Mapping[DeviceId, Any] = field(default_factory=dict)
    release: Callable[[DeviceId], Release] | None = None

    def keeps(self, transfer_key: TransferKey) -> bool:
        """Whether a task is kept until it is answered, or replaced by the next one."""
        return self.outlive and not transfer_key.final_evaluation

    def ready(self, device: DeviceId, transfer_key: TransferKey) -> Callable[[], bytes]:
        """What makes the encoded task; it raises PacketNotFinite (see `assigned`). Inside `store.step()`."""
        if not self.keeps(transfer_key):
            tasks = self.planned
            return lambda: self._assigned(tasks, device, transfer_key)
        if (
            self.store.task(device, transfer_key.round, transfer_key.attempt) is None
        ):  # else it came back to the task it had
            with suppress(PacketNotFinite):  # it is made again, and found again, when it is to be sent
                data = self._assigned(self.planned, device, transfer_key)
                self.store.add_task(device, transfer_key.round, transfer_key.attempt, data)
        return lambda: self.payload(device, transfer_key)

    def payload(self, device: DeviceId, transfer_key: TransferKey) -> bytes:
        """The task as it is sent, or was."""
        kept = (
            self.store.task(device, transfer_key.round, transfer_key.attempt)
            if self.keeps(transfer_key)
            else None
        )
        return self._assigned(self.planned, device, transfer_key) if kept is None else kept

    def sent(self, device: DeviceId, turn: Turn, open_turn: Turn) -> Any | None:
        """The task that a device answers in this turn; None: it is not known any more."""
        if not self.outlive:
            return self.planned[device] if turn == open_turn and device in self.planned else None
        data = self.store.task(device, *turn)
        if data is None:
            return None
        kind = Assignment[self.kind]  # type: ignore[name-defined]
        assignment: Assignment[Any] = codec.decode(data, kind, self.spec)
        return assignment.task

    def answered(self, device: DeviceId) -> None:
        """Its task has done its part."""
        if self.outlive:
            self.store.drop_task(device)

    def _assigned(self, tasks: Mapping[DeviceId, Any], device: DeviceId, transfer_key: TransferKey) -> bytes:
        release = UNSET if self.release is None else self.release(device)
        return assigned(tasks, device, transfer_key, self.spec, release)


def assigned(
    tasks: Mapping[DeviceId, Any],
    device: DeviceId,
    transfer_key: TransferKey,
    spec: ModelSpec,
    release: Release | UnsetType = UNSET,
) -> bytes:
    """The encoded `Assignment` of a device; its task may only be made now.

    Raises:
        PacketNotFinite: a number in the task is NaN or infinite, and nobody could train on it.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found below
        task = tasks[device]
    if (where := not_finite(task, "task")) is not None:
        raise PacketNotFinite(f"{where} for {device} is not finite: it is not sent")
    turn = transfer_key.round, transfer_key.attempt, transfer_key.final_evaluation
    return codec.encode(Assignment(device, *turn, task, release), spec)
