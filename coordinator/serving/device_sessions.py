"""One device as the coordinator's loop knows it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from msgspec.structs import replace

from fleetune.coordinator.rounds.engine_state import NEVER, RoundAttempt
from fleetune.coordinator.run.run_events import Activity
from fleetune.coordinator.serving.payload_buffer import MemoryBudget, buffered_parts
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.inbox import Inbox
from fleetune.protocols.wire.incoming_parts import part_folder
from fleetune.protocols.wire.messages import Measured, Offer, TransferKey
from fleetune.protocols.wire.peer_link import PeerLink


@dataclass
class DeviceSession:
    """One device.

    Attributes:
        device: its name.
        link: what passes between us.
        instance: of its agent; a new one means that it was restarted.
        agent: program and version of its agent.
        online: by its last presence.
        second: the agent that is connected is told to leave: another device holds the name.
        enrolled: it has taken the run's enrolment from this process, or said that it has it.
        stage, progress: what it said it is doing.
        measured: what it said the open round's work took, and what it had expected.
        offered_at: when it offered the update that is arriving.
        download_s: how long its task took to arrive.
        tasked: the turn of the latest task that this process sent it.
        asked: how often it asked for each thing since it came, by name and turn (see `note_asked`).
    """

    device: str
    link: PeerLink
    instance: str = ""
    agent: str = ""
    online: bool = False
    second: bool = False
    enrolled: bool = False
    stage: Literal["", "training", "evaluating"] = ""
    progress: float = 0.0
    measured: Measured | None = None
    offered_at: float | None = None
    download_s: float | None = None
    tasked: RoundAttempt | None = None
    asked: dict[str, tuple[RoundAttempt, int]] = field(default_factory=dict)

    @classmethod
    def met(
        cls,
        device: str,
        folder: Path,
        max_bytes: int,
        objects: Callable[[TransferKey], str | None],
        room: MemoryBudget,
        lacks: Callable[[Offer], str | None],
    ) -> Self:
        """A device that was just heard of.

        Args:
            device: its name.
            folder: for what arrives from it.
            max_bytes: the longest payload it may send.
            objects: why a transfer key is not wanted; None if it is.
            room: for what is small, of all devices.
            lacks: why there is no room for an offer; None if there is.
        """
        parts = buffered_parts(part_folder(folder), room)
        inbox = Inbox(device, parts, max_bytes=max_bytes, objects=objects, lacks=lacks)
        return cls(device, PeerLink(device, "coordinator", inbox))

    @property
    def is_busy(self) -> bool:
        """Whether a payload is on its way to or from it, or it said that it is at work."""
        return bool(self.link.outbox) or self.link.inbox.progress is not None or bool(self.stage)

    @property
    def activity(self) -> Activity | None:
        """What the device is busy with, as far as the wire shows."""
        if not self.online:
            return None
        if self.link.outbox.progress is not None:
            return Activity("receiving", self.link.outbox.progress)
        if self.link.inbox.progress is not None:
            return Activity("sending", self.link.inbox.progress)
        return Activity(self.stage, self.progress) if self.stage else None

    def note_asked(self, what: str, turn: RoundAttempt = NEVER) -> int:
        """How often the device has asked for this in this turn, since it came."""
        before, times = self.asked.get(what, (turn, 0))
        times = times + 1 if before == turn else 1
        self.asked[what] = turn, times
        return times

    def forget_times(self) -> None:
        """A new task is on its way: what was measured belongs to the one before."""
        self.measured = self.offered_at = self.download_s = None

    def actual(self, now: float) -> RoundCost:
        """Of its part in the round, its update having arrived `now`; where it says nothing, by our clock."""
        upload_s = None if self.offered_at is None else max(0.0, now - self.offered_at)
        said = self.measured.actual if self.measured else RoundCost()
        download_s = self.download_s if said.download_s is None else said.download_s
        return replace(said, download_s=download_s, upload_s=upload_s)

    @property
    def predicted(self) -> RoundCost:
        """What it expected its part in the round to take."""
        return self.measured.predicted if self.measured else RoundCost()


class DeviceSessions(dict[str, DeviceSession]):
    """Devices heard of since the start, by name, and those among them that something is open with.

    Attributes:
        room: for what is small.
        incoming_bytes: of all payloads that are arriving, what is not here yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.room = MemoryBudget()
        self._busy: set[str] = set()
        self.incoming_bytes = 0
        self._missing: dict[str, int] = {}

    def note(self, peer: DeviceSession) -> None:
        """It said something, or was told something."""
        (self._busy.add if peer.is_busy else self._busy.discard)(peer.device)
        self._expect(peer.device, peer.link.inbox.missing_bytes)

    def forget(self, device: str) -> None:
        """As if nothing was ever heard of it; that need not be the case."""
        peer = self.pop(device, None)
        if peer is not None:
            self._busy.discard(device)
            peer.link.inbox.give_up_all()
            self._expect(device, 0)

    def _expect(self, device: str, num_bytes: int) -> None:
        self.incoming_bytes += num_bytes - self._missing.pop(device, 0)
        if num_bytes:
            self._missing[device] = num_bytes

    def busy(self) -> list[DeviceSession]:
        """Those with a payload on its way to or from them, or at work, ascending."""
        return [self[device] for device in sorted(self._busy)]

    def activities(self) -> dict[str, Activity]:
        """Of those that are busy, by name."""
        found = {device: peer.activity for device, peer in self.items()}
        return {device: activity for device, activity in found.items() if activity is not None}
