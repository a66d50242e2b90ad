"""The session of each device: its transfers, its presence, and its reports on the open round."""

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
    """What this process knows of one device since the device's first message.

    Attributes:
        identity: the device's id, name, and how it is known.
        link: the transfers in both directions.
        name: the name that the agent gives the device; "" for none.
        instance: id of the agent's process; a new one means that the agent was restarted.
        agent: program and version of the agent.
        reads: the formats and features that the agent can read.
        online: True if the device's last presence message reports it connected.
        is_duplicate: True if the connected agent must leave, because another device holds the name.
        enrolled: True if this process sent the run's enrolment, or the device confirmed that it has it.
        stage: the activity that the device reports; "" for none.
        progress: finished fraction of that activity, from 0 to 1.
        measured: the measured and the predicted cost of the open round, as the device reported them.
        offered_at: the time at which the device offered the update that is arriving.
        download_s: the time that the device's task took to arrive.
        task_attempt: the attempt at a round of the latest task that this process sent.
        requests: attempt and number of requests, for each kind of request (see `count_request`).
    """

    identity: Identity
    link: PeerLink
    name: str = ""
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
        """Return the session of a device that sent its first message.

        Args:
            device: the device's id.
            folder: folder for payloads that arrive from it.
            max_bytes: length of the longest payload that the device may send.
            objects: function that returns the reason why a transfer is rejected, or None.
            memory: the memory for small payloads of all devices.
            lacks: function that returns the reason why there is no disk space for an offer, or None.
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
        """True if a transfer to or from the device is open, or the device reports that it works."""
        return bool(self.link.outbox) or self.link.inbox.progress is not None or bool(self.stage)

    @property
    def activity(self) -> Activity | None:
        """The device's present activity, as far as its messages show; None if unknown."""
        if not self.online:
            return None
        if self.link.outbox.progress is not None:
            return Activity("receiving", self.link.outbox.progress)
        if self.link.inbox.progress is not None:
            return Activity("sending", self.link.inbox.progress)
        return Activity(self.stage, self.progress) if self.stage else None

    def count_request(self, what: str, attempt: RoundAttempt = NEVER) -> int:
        """Count a request, and return how often the device has made it during this attempt."""
        before, times = self.requests.get(what, (attempt, 0))
        times = times + 1 if before == attempt else 1
        self.requests[what] = attempt, times
        return times

    def reset_measurements(self) -> None:
        """Clear what the device measured for its previous task, because a new task is sent."""
        self.measured = self.offered_at = self.download_s = None

    def actual(self, now: float) -> RoundCost:
        """Return the cost of the device's part in the round, given that its update arrived at `now`.

        The coordinator's own measurements replace times that the device did not report.
        """
        upload_s = None if self.offered_at is None else max(0.0, now - self.offered_at)
        reported = self.measured.actual if self.measured else RoundCost()
        download_s = self.download_s if reported.download_s is None else reported.download_s
        return replace(reported, download_s=download_s, upload_s=upload_s)

    @property
    def predicted(self) -> RoundCost:
        """Return the cost that the device predicted for its part in the round."""
        return self.measured.predicted if self.measured else RoundCost()


class DeviceSessions(dict[str, DeviceSession]):
    """The sessions of all devices that sent a message since this process started, by id.

    Attributes:
        memory: the memory for small payloads that arrive.
        incoming_bytes: bytes that have yet to arrive of all open transfers from devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.memory = MemoryBudget()
        self.incoming_bytes = 0
        self._busy: set[str] = set()
        self._missing: dict[str, int] = {}

    def identity(self, device: str) -> Identity:
        """Return a device's id, name and how it is known, as far as it has introduced itself."""
        session = self.get(device)
        return Identity.of(device) if session is None else session.identity

    def refresh(self, session: DeviceSession) -> None:
        """Update, after a message, whether the session is busy and how many bytes have yet to arrive."""
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
        """Return the sessions with an open transfer or a device at work, by ascending id."""
        return [self[device] for device in sorted(self._busy)]

    def activities(self) -> dict[str, Activity]:
        """Return the activity of each busy device, by id."""
        found = {device: session.activity for device, session in self.items()}
        return {device: activity for device, activity in found.items() if activity is not None}

    def _expect(self, device: str, num_bytes: int) -> None:
        self.incoming_bytes += num_bytes - self._missing.pop(device, 0)
        if num_bytes:
            self._missing[device] = num_bytes
