"""Handles messages from devices: admits each, reads it, and passes it to the responsible part."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.broker.broker_log import Refused
from fleetune.coordinator.broker.known_devices import BrokerRefused, DevicesChanged
from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.admission import Admission
from fleetune.coordinator.serving.bundle_server import BundleMade
from fleetune.coordinator.serving.device_sessions import DeviceSession
from fleetune.coordinator.serving.joining import Joining
from fleetune.coordinator.serving.message_checks import check_decline, open_session
from fleetune.coordinator.serving.rejected_messages import RejectedMessages
from fleetune.coordinator.serving.renewals import Renewals, RenewalsSigned
from fleetune.coordinator.serving.requested_files import RequestedFiles
from fleetune.coordinator.serving.task_exchange import TaskExchange
from fleetune.coordinator.store.broker_outage import Outage, write_outage
from fleetune.coordinator.store.troubles import note_trouble
from fleetune.protocols.errors import PacketError, PacketForeign, StoreError, TransportError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.compact_message import is_compact
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume
from fleetune.protocols.wire.transport import Connected, Disconnected, Received

log = logging.getLogger(__name__)


@dataclass
class DeviceMessages:
    """Handles events from the broker, and records when the broker cannot be reached.

    Attributes:
        run: the run.
        admission: decides which messages are read.
        exchange: tasks and replies, with the sessions of all devices.
        joining: handles devices that connect and disconnect.
        renewals: renews certificates.
        files: sends bundle and backbone.
        rejected: counts and logs rejected messages.
        outage: the present outage of the broker; None while it can be reached.
    """

    run: Run
    admission: Admission
    exchange: TaskExchange
    joining: Joining
    renewals: Renewals
    files: RequestedFiles
    rejected: RejectedMessages
    outage: Outage | None = None

    def handle(self, event: Any) -> None:
        """Handle an event of the transport, or a finished bundle. Raises StoreError."""
        try:
            match event:
                case Connected():
                    self._note_outage(None)
                    for session in self.exchange.sessions.values():
                        self.exchange.advance(session, session.link.reconnected(self.exchange.timer()))
                case Disconnected(reason):
                    self._note_outage(reason)
                case Received(topic, data) if (ping := wire.read_ping(data)) is not None:
                    self._answer_ping(topics.parse(topic, with_role=True), data, ping)
                case Received(topic, data):
                    self._receive(topics.parse(topic), data)
                case _:
                    self._note_news(event)
        except PacketError as problem:
            self.rejected.note(problem)

    def _note_news(self, event: Any) -> None:
        """Handle an event of the broker's side or of another thread."""
        match event:
            case DevicesChanged(shut_out):
                self.joining.note_changed(shut_out)
            case BrokerRefused(counts):
                self._note_refused(counts)
            case RenewalsSigned():
                self.renewals.note_signed(event)
            case BundleMade():
                self.files.note_made(event)

    def _answer_ping(self, address: topics.Address, data: bytes, ping: wire.Ping) -> None:
        """Answer a ping on each channel of the device, so that the agent can test its rights to read and
        write.
        """
        if self.admission.admits(address, data):
            channels = (*topics.TO_DEVICE, topics.PROBE)
            self.exchange.transfers.publish_on(address.device, channels, wire.Pong(ping.nonce))

    def _note_refused(self, counts: Mapping[Refused, int]) -> None:
        """Count and log what the broker refused; `status` shows the last refusal."""
        for refused, times in counts.items():
            member = refused.is_device and refused.device in self.run.controller.members
            self.run.controller.count_refused("broker", times, device=refused.device if member else None)
            more = f" ({times} times)" if times > 1 else ""
            self.rejected.say(logging.WARNING, refused.device, f"{refused}{more}")
            at = time.strftime("%Y-%m-%d %H:%M")  # no seconds, so that a flood seldom writes the store
            note_trouble(self.run.store, "broker", f"{refused} (last at {at})")

    def _note_outage(self, reason: str | None) -> None:
        """Record why the broker cannot be reached, or None when it can be reached again."""
        if reason is None and self.outage is None:
            return
        if reason is not None:
            log.warning("no connection to the broker: %s; the coordinator keeps trying", reason)
        since = time.time() if self.outage is None else self.outage.since
        self.outage = None if reason is None else Outage(since, reason)
        write_outage(self.run.store, self.outage)

    def _receive(self, address: topics.Address, data: bytes) -> None:
        try:
            if self.admission.admits(address, data):
                self._read(address.device, address.channel, data)
        except PacketError as problem:
            self.rejected.note(problem, address.device)
        except (StoreError, TransportError):
            raise
        except Exception as fault:  # noqa: BLE001 - one device must not stop the others, whatever it sends
            self.rejected.blame(address.device, fault)

    def _read(self, device: str, channel: str, data: bytes) -> None:
        if channel == "state" and not data:
            return  # a retained presence was cleared
        session = self.exchange.sessions.get(device)
        if channel != "state" and session is not None and session.is_duplicate:
            self.run.controller.count_refused("second-device", device=device)
            return
        if channel == "update":
            self._take_chunk(session, data)
            return
        message = wire.read_from_device(data)
        if isinstance(message, wire.Presence) != (channel == "state"):
            raise PacketForeign(f"a {type(message).__name__} does not belong on {channel!r}")
        session = session or open_session(self.run, device, self.exchange.sessions)
        # the answer has the form of the message, if the agent reads that form
        session.link.compact = is_compact(data) and "compact" in session.reads.features.messages
        self._dispatch(session, message)

    def _take_chunk(self, session: DeviceSession | None, data: bytes) -> None:
        if session is None:
            raise PacketForeign("a chunk of a transfer that the device has not offered")
        self.exchange.advance(session, session.link.take_chunk(data, self.exchange.timer()))

    def _dispatch(self, session: DeviceSession, message: wire.FromDevice) -> None:
        ours = self.run.enrolment.run
        match message:
            case wire.Presence():
                self.joining.note_presence(session, message)
            case Offer() | Resume() | Ack() | Refuse():
                self.exchange.advance(session, session.link.handle(message, self.exchange.timer()))
            case wire.Fetch(run, what) if run == ours:
                self.files.send(session, what)
            case wire.Ready():
                self.joining.note_ready(session, message)
            case wire.Renew():
                self.renewals.take(session, message, self.exchange.timer())
            case wire.Left(run):
                self.joining.note_left(session, run)
            case wire.Working() | wire.Measured() if message.run == ours:
                self.exchange.note_work(session, message)
            case wire.Decline(run, number, attempt, reason, diverged) if run == ours:
                check_decline(number, session, self.run)
                self.exchange.note_declined(session, RoundAttempt(number, attempt), reason, diverged=diverged)
