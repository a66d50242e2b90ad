"""Handles devices that join, reconnect or leave, and agents that share one device id."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import UNSET

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.broker.known_devices import KnownDevices
from fleetune.coordinator.rounds.engine_state import NEVER
from fleetune.coordinator.rounds.events import Declined, DeviceGone, DeviceReady
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.capability_check import features_needed, refusal_of
from fleetune.coordinator.serving.device_sessions import DeviceSession, DeviceSessions
from fleetune.coordinator.serving.duplicate_names import DuplicateNames
from fleetune.coordinator.serving.message_checks import check_ready
from fleetune.coordinator.serving.rejected_messages import RejectedMessages
from fleetune.coordinator.serving.task_exchange import MAX_REQUESTS, TaskExchange
from fleetune.coordinator.store.troubles import note_trouble
from fleetune.protocols.wire.capabilities import ONLY_THE_MINIMUM
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.peer_link import Packet

log = logging.getLogger(__name__)

NOTE_SEEN_S = 60.0  # between two notes in the registry that a device is still connected


@dataclass
class Joining:
    """Enrols devices that connect, and reports devices that are ready or gone.

    Attributes:
        run: the run.
        sessions: the sessions of all devices.
        exchange: reports events to the run controller and sends payloads.
        rejected: logs rejections, within limits.
        devices: the identities of the broker's devices.
    """

    run: Run
    sessions: DeviceSessions
    exchange: TaskExchange
    rejected: RejectedMessages
    devices: KnownDevices = field(default_factory=KnownDevices)
    _names: DuplicateNames = field(default_factory=DuplicateNames)
    _note_at: float = float("-inf")
    _shared: set[str] = field(default_factory=set)  # ids that several devices use

    def __post_init__(self) -> None:
        self._needed = features_needed(self.run.enrolment)

    @property
    def present(self) -> set[str]:
        """Return devices that may be connected: online ones, and members not heard since this process
        started.
        """
        unheard = {device for device in self.run.controller.members if device not in self.sessions}
        return unheard | {device for device, session in self.sessions.items() if session.online}

    @property
    def absent(self) -> set[str]:
        """Return the members of the run that are not connected."""
        return set(self.run.controller.members) - self.present

    def note_presence(self, session: DeviceSession, presence: wire.Presence) -> None:
        """Enrol a device that connected, or report a device that is gone."""
        online, instance = presence.online, presence.instance
        if not online and instance != session.instance:
            return  # the broker reports an agent that had lost the id before
        self._note_introduction(session, presence)
        wait_s = self._names.connected(session.device, instance, self.exchange.timer()) if online else 0.0
        if online:
            session.is_duplicate = wait_s > 0
            self._note_shared(session.device)
        if wait_s > 0:
            taken = Packet("down", wire.NameTaken(instance, wait_s))
            self.exchange.transfers.publish(session, taken)
            return
        if session.online and not online:
            self._note_seen(session)
        lost = session.online and (not online or instance != session.instance)
        session.online, session.instance, session.stage = online, instance, ""
        if lost:
            self._drop(session)
        if online:
            session.requests.clear()
            self.exchange.advance(session, session.link.reconnected(self.exchange.timer()))
            self._enrol(session)

    def _note_introduction(self, session: DeviceSession, presence: wire.Presence) -> None:
        """Store the device's identity and what its agent can read, if the presence message has them."""
        if presence.online:
            name = session.name = "" if presence.name is UNSET else wire.readable(presence.name)
            session.agent = wire.readable(presence.agent)
            session.identity = self.devices.identity(session.device, name)
            self._note_seen(session)
            session.reads = ONLY_THE_MINIMUM if presence.reads is UNSET else presence.reads

    def _note_seen(self, session: DeviceSession) -> None:
        self.devices.note_seen(session.device, session.name, session.agent)

    def note_ready(self, session: DeviceSession, ready: wire.Ready) -> None:
        """Check a device's report, and record the device as ready.

        Raises:
            PacketError: the report is not plausible, see `check_ready`.
        """
        if ready.run != self.run.enrolment.run:
            return  # it belongs to an earlier run; the device gets our enrolment anyway
        check_ready(ready, session, self.run)
        self._limit_requests(session)
        base = None if ready.base is UNSET else ready.base
        self.exchange.report(DeviceReady(ready.report, base, session.agent, session.identity))

    def note_left(self, session: DeviceSession, run: str) -> None:
        """Enrol a device again that left because a message announced the end of this run.

        The announcement came from an earlier coordinator or from an unknown client. The broker may still
        retain it for the device, so it is removed first.
        """
        self.exchange.transfers.clear_retained(session.device)
        if run != self.run.enrolment.run or self.exchange.asks_too_often(
            session, "to be told that the run goes on"
        ):
            return
        line = f"{session.identity} has left a run that goes on"
        self.rejected.say(logging.WARNING, session.device, line)
        self._drop(session)
        self._enrol(session)

    def note_changed(self, shut_out: Mapping[str, str]) -> None:
        """Use the present names of all devices, and let those leave the round that may not connect.

        `shut_out` has the reasons by device. A device that may connect again takes part once it is ready.
        """
        for session in list(self.sessions.values()):
            session.identity = self.devices.identity(session.device, session.identity.name)
            if session.device in shut_out and session.online:
                session.online = False
                self._drop(session)
        members = self.run.controller.members
        for device, reason in shut_out.items():
            if device in members and members[device].refusal != reason:
                self.exchange.report(Declined(device, *NEVER, reason))

    def note_throttled(self, device: str, throttled: bool) -> None:
        """Drop a device whose throttling begins, or enrol it again when throttling ends."""
        session = self.sessions.get(device)
        if session is not None and throttled:
            self._drop(session)
        elif session is not None and session.online:
            self._enrol(session)

    def forget(self, device: str) -> None:
        """Forget a device that never became a member of the run."""
        self.exchange.transfers.forget(device)
        self._names.forget(device)

    def look(self, now: float) -> None:
        """Record names that only one device still uses, and once a minute which devices are connected."""
        if now >= self._note_at:
            self._note_at = now + NOTE_SEEN_S
            for session in self.sessions.values():
                if session.online:
                    self._note_seen(session)
        for device in self._names.look(now):
            self._note_shared(device)

    def _note_shared(self, device: str) -> None:
        """Log and store that several devices use one name, or that only one device still uses it."""
        line = (
            f"two devices use the id {device}: the first one keeps it, the other is asked to wait; start one"
            " of them with another --device, or let a copy of a joined device join with a --state of its own"
        )
        shared = self._names.shared(device)
        if shared == (device in self._shared):
            return
        (self._shared.add if shared else self._shared.discard)(device)
        log.warning("%s", line if shared else f"only one device still uses the id {device}")
        note_trouble(self.run.store, f"id {device}", line if shared else None)

    def _drop(self, session: DeviceSession) -> None:
        session.enrolled = False
        self.exchange.advance(session, session.link.drop(lambda _: True, self.exchange.timer()))
        self.exchange.report(DeviceGone(session.device))

    def _enrol(self, session: DeviceSession) -> None:
        """Send the run's enrolment to a device, or refuse the device if its agent lacks a needed feature."""
        refusal = refusal_of(session, self._needed, ["choose other encodings in the run's [encoding]"])
        if refusal is not None:
            self._refuse(session, refusal)
            return
        key = TransferKey("enrolment", self.run.enrolment.run)
        ratio = self.run.settings.fleet.assigned_ratio(session.device)
        items = session.link.post(key, self.run.payload, self.exchange.timer(), ratio=ratio)
        self.exchange.advance(session, items)

    def _refuse(self, session: DeviceSession, refusal: str) -> None:
        """Send a device the reason why it is refused. The reason is stored only for members, whose number is
        limited.
        """
        if session.enrolled:  # its agent was replaced by another one
            self._drop(session)
        self.exchange.transfers.publish_on(
            session.device, ["down"], wire.NotAdmitted(self.run.enrolment.run, refusal)
        )
        is_member = session.device in self.run.controller.members
        self.run.controller.count_refused("not-admitted", device=session.device if is_member else None)
        self.rejected.say(logging.WARNING, session.device, f"not admitted: {refusal}")
        if is_member:
            self.exchange.report(Declined(session.device, *NEVER, refusal))

    def _limit_requests(self, session: DeviceSession) -> None:
        """Drop a device from the round if it reports ready too often although it already has its task.

        A device may report ready a few times before its reply: with new values, or because it cannot read the
        task.
        """
        attempt = self.run.controller.awaited_attempt(session.device)
        if attempt is None or attempt != session.task_attempt or session.download_s is None:
            return
        if self.exchange.asks_too_often(session, "for its task", attempt):
            reason = f"it asked for its task {MAX_REQUESTS} times"
            self.exchange.report(Declined(session.device, *attempt, reason))
