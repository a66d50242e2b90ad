"""The tasks of the open round: made when they are sent, and fit for that."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleetune.coordinator.run.reply_checks import not_finite
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import PacketNotFinite
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.skeletons.method import DeviceId
from fleetune.protocols.update import codec
from fleetune.protocols.wire.messages import Errand
from fleetune.protocols.wire.payloads import Assignment


@dataclass
class Tasks:
    """Planned tasks as they are sent.

    Attributes:
        store: of the run.
        spec: its model.
        outlive: semi-asynchronously tasks outlive the state they were planned on, so they are kept as sent.
        planned: of the open round, by participant.
    """

    store: RunStore
    spec: ModelSpec
    outlive: bool
    planned: Mapping[DeviceId, Any] = field(default_factory=dict)

    def keeps(self, errand: Errand) -> bool:
        """Whether a task is kept until it is answered, or replaced by the next one."""
        return self.outlive and not errand.rehearsal

    def ready(self, device: DeviceId, errand: Errand) -> Callable[[], bytes]:
        """What makes the encoded task; it raises PacketNotFinite (see `assigned`). Inside `store.step()`."""
        if not self.keeps(errand):
            tasks = self.planned
            return lambda: assigned(tasks, device, errand, self.spec)
        if (
            self.store.task(device, errand.round, errand.attempt) is None
        ):  # else it came back to the task it had
            with suppress(PacketNotFinite):  # it is made again, and found again, when it is to be sent
                data = assigned(self.planned, device, errand, self.spec)
                self.store.add_task(device, errand.round, errand.attempt, data)
        return lambda: self.payload(device, errand)

    def payload(self, device: DeviceId, errand: Errand) -> bytes:
        """The task as it is sent, or was."""
        kept = self.store.task(device, errand.round, errand.attempt) if self.keeps(errand) else None
        return assigned(self.planned, device, errand, self.spec) if kept is None else kept

    def answered(self, device: DeviceId) -> None:
        """Its task has done its part."""
        if self.outlive:
            self.store.drop_task(device)


def assigned(tasks: Mapping[DeviceId, Any], device: DeviceId, errand: Errand, spec: ModelSpec) -> bytes:
    """The encoded `Assignment` of a device; its task may only be made now.

    Raises:
        PacketNotFinite: a number in the task is NaN or infinite, and nobody could train on it.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # found below
        task = tasks[device]
    if (where := not_finite(task, "task")) is not None:
        raise PacketNotFinite(f"{where} for {device} is not finite: it is not sent")
    return codec.encode(Assignment(device, errand.round, errand.attempt, errand.rehearsal, task), spec)
