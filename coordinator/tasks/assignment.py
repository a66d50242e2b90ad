"""Makes and checks the tasks of the open round when they are sent."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.rounds.events import Declined
from fleetune.coordinator.store.run_store import RunStore
from fleetune.coordinator.tasks.downlink import Delivered, Downlink
from fleetune.protocols.errors import PacketNotFinite
from fleetune.protocols.finite import not_finite
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update import codec
from fleetune.protocols.update.paper_bytes import paper_bytes
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.shared_payload_cache import PayloadContent
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Assignment

_MOST_IN_TRANSIT = 64  # bounds the undelivered tasks a device whose paper bytes are remembered


@dataclass(frozen=True)
class OutgoingTask:
    """A task for one device. `make` returns its payload, when it is sent and not before.

    `make` raises PacketNotFinite if the task must not be sent; then report `declined` to the run controller.
    """

    device: DeviceId
    transfer_key: TransferKey
    make: Callable[[], bytes]

    def declined(self, problem: PacketNotFinite) -> Declined:
        """Return the event to report when the task cannot be sent, as if the device had declined it."""
        return Declined(
            self.device, self.transfer_key.round, self.transfer_key.attempt, str(problem), diverged=True
        )


@dataclass
class Tasks:
    """Planned tasks, as they are sent.

    Attributes:
        store: the run's store.
        spec: the run's model.
        kind: type of the method's tasks.
        outlive: True in semi-asynchronous runs: tasks outlive the state they were planned on, so they are
            stored.
        before_send: returns a task as it is sent (see `coordinator.extensions`).
        downlink: writes tasks as differences; None: tasks are sent whole.
        planned: the tasks of the open round, by participant.
    """

    store: RunStore
    spec: ModelSpec
    kind: type
    outlive: bool
    before_send: Callable[[Assignment[Any]], Assignment[Any]]
    downlink: Downlink | None = None
    planned: Mapping[DeviceId, Any] = field(default_factory=dict, init=False)
    _paper_bytes: dict[DeviceId, dict[RoundAttempt, float]] = field(default_factory=dict, init=False)

    def keeps(self, transfer_key: TransferKey) -> bool:
        """True if a task is stored until it is answered, or replaced by the next one."""
        return self.outlive and not transfer_key.final_evaluation

    def ready(self, device: DeviceId, transfer_key: TransferKey) -> Callable[[], bytes]:
        """Return a function that returns the encoded task, or raises PacketNotFinite (see `assigned`).

        Call this inside `store.step()`.
        """
        if not self.keeps(transfer_key):
            tasks = self.planned
            return lambda: self._written(self._assigned(tasks, device, transfer_key))
        if (
            self.store.task(device, transfer_key.round, transfer_key.attempt) is None
        ):  # otherwise the device reconnected for the task it had
            with suppress(PacketNotFinite):  # it is made again, and found again, when it is to be sent
                data = codec.encode(self._assigned(self.planned, device, transfer_key), self.spec)
                self.store.add_task(device, transfer_key.round, transfer_key.attempt, data)
        return lambda: self.payload(device, transfer_key)

    def payload(self, device: DeviceId, transfer_key: TransferKey) -> bytes:
        """Return the encoded task, new or as it was sent before."""
        round_attempt = RoundAttempt.of(transfer_key)
        stored = self.store.task(device, *round_attempt) if self.keeps(transfer_key) else None
        if stored is not None and self.downlink is None:
            return stored
        planned = self._assigned(self.planned, device, transfer_key) if stored is None else self._read(stored)
        return self._written(planned)

    def sent(
        self, device: DeviceId, round_attempt: RoundAttempt, open_attempt: RoundAttempt
    ) -> Assignment[Any] | None:
        """Return the task planned for a device that answers this attempt; None if it is no longer known."""
        if not self.outlive:
            known = round_attempt == open_attempt and device in self.planned
            return Assignment(device, *round_attempt, False, self.planned[device]) if known else None
        data = self.store.task(device, *round_attempt)
        return None if data is None else self._read(data)

    def delivered(
        self, device: DeviceId, round_attempt: RoundAttempt, open_attempt: RoundAttempt
    ) -> Delivered | None:
        """Return a task as its device received it; None if it is no longer known."""
        planned = self.sent(device, round_attempt, open_attempt)
        if planned is None:
            return None
        if self.downlink is None:
            return Delivered(planned.task, ReferenceModel.of_task(planned.task, self.spec))
        return self.downlink.delivered(planned)

    def note_held(
        self, device: DeviceId, digest: str | None, awaited: RoundAttempt | None, open_attempt: RoundAttempt
    ) -> None:
        """Record the model that a device reports to have, inside `store.step()`.

        Args:
            device: the device.
            digest: digest of the model that it holds; None if it cannot use differences.
            awaited: the round and attempt that it is expected to answer; None for none.
            open_attempt: the round and attempt that is open or comes next.
        """
        if self.downlink is None:
            return
        held = self.downlink.held
        if digest is None:
            held.forget(device)
        elif not held.is_known(device, digest):
            delivered = None if awaited is None else self.delivered(device, awaited, open_attempt)
            if delivered is None or delivered.reference.digest != digest:
                held.begin_anew(device)
            # the coordinator forgot it, but the device has done its task and its reply is on the way
            elif held.of(device) is None:
                held.advance(device, delivered.reference)

    def taken(self, device: DeviceId, delivered: Delivered) -> None:
        """Record that the device answered, so that it has the model of its task. Inside `store.step()`."""
        if self.downlink is not None and delivered.advances:
            self.downlink.held.advance(device, delivered.reference)

    def perhaps_taken(
        self, device: DeviceId, round_attempt: RoundAttempt, open_attempt: RoundAttempt
    ) -> None:
        """Record that a device's answer to its task of this attempt no longer counts. Inside `store.step()`.

        The device has the task's model if it did the work, else its previous model; both are remembered.
        """
        if self.downlink is None:
            return
        delivered = self.delivered(device, round_attempt, open_attempt)
        if delivered is not None and delivered.advances:
            self.downlink.held.advance(device, delivered.reference, unsure=True)

    def answered(self, device: DeviceId) -> None:
        """Drop the stored task of a device that has answered it."""
        if self.outlive:
            self.store.drop_task(device)

    def paper_bytes(self, device: DeviceId, round_attempt: RoundAttempt) -> float:
        """Return the bytes, as papers count them, of a task that reached its device; then forget the task.

        Earlier tasks of the device are forgotten too.
        """
        made = self._paper_bytes.pop(device, {})
        if later := {one: num_bytes for one, num_bytes in made.items() if one > round_attempt}:
            self._paper_bytes[device] = later
        if round_attempt in made:
            return made[round_attempt]
        stored = self.store.task(device, *round_attempt)  # a restart came in between
        return 0.0 if stored is None else paper_bytes(self._read(stored).task)

    @property
    def made(self) -> list[tuple[DeviceId, int, int, float]]:
        """Return the bytes, as papers count them, of tasks in flight, by device, round and attempt."""
        paper_bytes = self._paper_bytes
        return [
            (one, *round_attempt, count)
            for one, made in paper_bytes.items()
            for round_attempt, count in made.items()
        ]

    @made.setter
    def made(self, made: list[tuple[DeviceId, int, int, float]]) -> None:
        self._paper_bytes = {}
        for device, number, attempt, count in made:
            self._paper_bytes.setdefault(device, {})[RoundAttempt(number, attempt)] = count

    @property
    def content(self) -> PayloadContent | None:
        """Content of the task that was made last, see `Downlink`."""
        return None if self.downlink is None else self.downlink.content

    def _read(self, data: bytes) -> Assignment[Any]:
        kind = Assignment[self.kind]  # type: ignore[name-defined]
        assignment: Assignment[Any] = codec.decode(data, kind, self.spec)
        return assignment

    def _written(self, assignment: Assignment[Any]) -> bytes:
        if self.downlink is None:
            return codec.encode(assignment, self.spec)
        return self.downlink.write(assignment)

    def _assigned(
        self, tasks: Mapping[DeviceId, Any], device: DeviceId, transfer_key: TransferKey
    ) -> Assignment[Any]:
        assignment = self.before_send(assigned(tasks, device, transfer_key))
        made = self._paper_bytes.setdefault(device, {})
        made[RoundAttempt.of(transfer_key)] = paper_bytes(assignment.task)
        if len(made) > _MOST_IN_TRANSIT:
            del made[min(made)]
        return assignment


def assigned(tasks: Mapping[DeviceId, Any], device: DeviceId, transfer_key: TransferKey) -> Assignment[Any]:
    """Return the `Assignment` of a device; its task may be computed only now.

    Raises:
        PacketNotFinite: a number in the task is NaN or infinite, so no device could train on it.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found below
        task = tasks[device]
    if (where := not_finite(task, "task")) is not None:
        raise PacketNotFinite(f"{where} for {device} is not finite: it is not sent")
    round_attempt = transfer_key.round, transfer_key.attempt, transfer_key.final_evaluation
    return Assignment(device, *round_attempt, task)
