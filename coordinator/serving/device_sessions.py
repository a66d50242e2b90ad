"""The session of each device: its transfers, its presence, and what it reported about the open round."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from msgspec.structs import replace

from fleetune.coordinator.rounds.engine_state import NEVER, RoundAttempt
from fleetune.coordinator.run.run_events import Activity
from fleetune.coordinator.serving.payload_buffer import MemoryBudget, buffered_parts
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.capabilities import ONLY_THE_MINIMUM, Capabilities
from fleetune.protocols.wire.identity import Identity
from fleetune.protocols.wire.inbox import Inbox
from fleetune.protocols.wire.incoming_parts import part_folder
from fleetune.protocols.wire.messages import Measured, Offer, TransferKey
from fleetune.protocols.wire.peer_link import PeerLink


@dataclass
class DeviceSession:
    """One device, from its first message to this process on.

    Attributes:
        identity: who the device is.
        link: the transfers in both directions.
        instance: id of the agent's process; a new one means that the agent was restarted.
        agent: program and version of the agent.
        reads: what the agent reads.
        online: True if its last presence says so.
        is_duplicate: True if the connected agent was told to leave, because another device holds the name.
        enrolled: True if it has the run's enrolment, sent by this process or confirmed to it.
        stage: what the device reports that it is doing; "" for nothing.
        progress: the finished part of that, from 0 to 1.
        measured: the measured and the predicted cost of the open round, as the device reported them.
        offered_at: the time at which it offered the update that is arriving.
        download_s: the time that its task took to arrive.
        task_attempt: the attempt at a round of the latest task that this process sent.
        requests: for each thing that it asked for, the attempt and how often (see `count_request`).
    """

    identity: Identity
    link: PeerLink
    instance: str = ""
    agent: str = ""
    reads: Capabilities = ONLY_THE_MINIMUM
    online: bool = False
    is_duplicate: bool = False
    enrolled: bool = False
    stage: Literal["", "training", "evaluating"] = ""
    progress: float = 0.0
    measured: Measured | None = None
    offered_at: float | None = None
    download_s: float | None = None
    task_attempt: RoundAttempt | None = None
    requests: dict[str, tuple[RoundAttempt, int]] = field(default_factory=dict)

    @classmethod
    def opened(
        cls,
        device: str,
        folder: Path,
        max_bytes: int,
        objects: Callable[[TransferKey], str | None],
        memory: MemoryBudget,
        lacks: Callable[[Offer], str | None],
    ) -> Self:
        """The session of a device that sent its first message.

        Args:
            device: the device's id.
            folder: folder for payloads that arrive from it.
            max_bytes: length of the longest payload that it may send.
            objects: returns the reason why a transfer is rejected, or None.
            memory: the memory for small payloads of all devices.
            lacks: returns the reason why there is no disk space for an offer, or None.
        """
        parts = buffered_parts(part_folder(folder), memory)
        inbox = Inbox(device, parts, max_bytes=max_bytes, objects=objects, lacks=lacks)
        return cls(Identity.of(device), PeerLink(device, "coordinator", inbox))

    @property
    def device(self) -> str:
        """The device's id."""
        return self.identity.id

    @property
    def is_busy(self) -> bool:
        """True if a transfer to or from the device is open, or if it reports that it works."""
        return bool(self.link.outbox) or self.link.inbox.progress is not None or bool(self.stage)

    @property
    def activity(self) -> Activity | None:
        """What the device is busy with, as far as its messages show."""
        if not self.online:
            return None
        if self.link.outbox.progress is not None:
            return Activity("receiving", self.link.outbox.progress)
        if self.link.inbox.progress is not None:
            return Activity("sending", self.link.inbox.progress)
        return Activity(self.stage, self.progress) if self.stage else None

    def count_request(self, what: str, attempt: RoundAttempt = NEVER) -> int:
        """Count a request, and return how often the device asked for this during this attempt."""
        before, times = self.requests.get(what, (attempt, 0))
        times = times + 1 if before == attempt else 1
        self.requests[what] = attempt, times
        return times

    def reset_measurements(self) -> None:
        """Forget what was measured for the task before, because a new task is sent."""
        self.measured = self.offered_at = self.download_s = None

    def actual(self, now: float) -> RoundCost:
        """The cost of the device's part in the round, if its update arrived at `now`.

        The coordinator's own times fill in what the device did not report.
        """
        upload_s = None if self.offered_at is None else max(0.0, now - self.offered_at)
        reported = self.measured.actual if self.measured else RoundCost()
        download_s = self.download_s if reported.download_s is None else reported.download_s
        return replace(reported, download_s=download_s, upload_s=upload_s)

    @property
    def predicted(self) -> RoundCost:
        """The cost that the device predicted for its part in the round."""
        return self.measured.predicted if self.measured else RoundCost()


class DeviceSessions(dict[str, DeviceSession]):
    """The sessions of all devices heard since the start, by id.

    Attributes:
        memory: the memory for small payloads that arrive.
        incoming_bytes: bytes of all open transfers from devices that are still missing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryBudget()
        self.incoming_bytes = 0
        self._busy: set[str] = set()
        self._missing: dict[str, int] = {}

    def identity(self, device: str) -> Identity:
        """Who a device is, as far as it has introduced itself."""
        session = self.get(device)
        return Identity.of(device) if session is None else session.identity

    def refresh(self, session: DeviceSession) -> None:
        """Note if the session is busy and how much of its payload is missing, after each message."""
        (self._busy.add if session.is_busy else self._busy.discard)(session.device)
        self._expect(session.device, session.link.inbox.missing_bytes)

    def forget(self, device: str) -> None:
        """Remove a session, if there is one."""
        session = self.pop(device, None)
        if session is not None:
            self._busy.discard(device)
            session.link.inbox.give_up_all()
            self._expect(device, 0)

    def busy(self) -> list[DeviceSession]:
        """Sessions with an open transfer or a device at work, by ascending id."""
        return [self[device] for device in sorted(self._busy)]

    def activities(self) -> dict[str, Activity]:
        """What each busy device does, by id."""
        found = {device: session.activity for device, session in self.items()}
        return {device: activity for device, activity in found.items() if activity is not None}

    def _expect(self, device: str, num_bytes: int) -> None:
        self.incoming_bytes += num_bytes - self._missing.pop(device, 0)
        if num_bytes:
            self._missing[device] = num_bytes
