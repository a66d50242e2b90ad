"""The agent's loop: messages in, messages out. A separate thread does the long work (jobs.py).

All events arrive in one queue: packets from the transport, results of jobs, the request to stop. Nothing is
polled, so an idle agent sleeps until something happens.
"""

import logging
import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import fleetune.protocols.wire.messages as wire
from fleetune.edge_agent.probes.channel_rights import ChannelRights
from fleetune.edge_agent.run.activity import Activity, ActivityNotifier
from fleetune.edge_agent.run.connection import Connection
from fleetune.edge_agent.run.coordinator_timeout import CoordinatorTimeout
from fleetune.edge_agent.run.device import Device
from fleetune.edge_agent.run.enrolling import Enrolling
from fleetune.edge_agent.run.intake import Intake
from fleetune.edge_agent.run.jobs import Jobs, Joined, Progress, Worked
from fleetune.edge_agent.run.participation import Participation
from fleetune.edge_agent.run.renewal import KeyMade, Renewal
from fleetune.protocols.errors import FleetuneError, PacketError, PacketForeign, StoreError
from fleetune.protocols.freed_memory import give_back
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.systemd.notify import service_manager
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.inbox import Arrived
from fleetune.protocols.wire.messages import Ack, Offer, Refuse
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Answered, Item, Packet, PeerLink
from fleetune.protocols.wire.transport import Connected, Disconnected, EventSink, Received, Transport
from fleetune.protocols.wire.transport.backlog import Backlog

log = logging.getLogger(__name__)

MAX_WAITING_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Stop:
    """Request to leave the broker cleanly and end."""

    reason: str


class Agent:
    """A device's side of the dialogue with its coordinator.

    Args:
        device: the device on which the agent runs; it is closed when the agent ends.
        make_transport: makes an unconnected transport from the will and the queue of events.
        find_rights: tests access rights when the coordinator is silent for too long; None to skip the test.
        leave_after_run: True to stop when a run is finished instead of waiting for the next.
        tell: called with the agent's activity at each change.
        clock: monotonic clock, in seconds.

    Raises:
        SettingError: there is no such trainer.
        ModelError: that trainer is not installed, or no trainer is.
    """

    def __init__(
        self,
        device: Device,
        make_transport: Callable[[bytes, EventSink], Transport],
        *,
        find_rights: Callable[[], ChannelRights] | None = None,
        leave_after_run: bool = False,
        tell: Callable[[Activity], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device, self._clock, self._leave_after_run = device, clock, leave_after_run
        settings = device.settings
        self.events = Backlog(MAX_WAITING_BYTES)
        self._notifier = ActivityNotifier(tell)
        self._connection = Connection(
            settings.fleet, device.settings.identity, make_transport, self.events, self._notifier
        )
        self._intake = Intake(
            settings.device,
            device.store,
            joined=lambda: self._participation.run,
            reason_not_to_train=device.guard.reason_not_to_train,
            clock=clock,
            memory=lambda: device.meter.conditions().memory_bytes,
        )
        self._link = PeerLink(settings.device, "device", self._intake)
        self._jobs = Jobs(self.events.put, clock)
        self._enrolling = Enrolling(device, self._jobs)
        self._participation = Participation(
            device,
            self._jobs,
            self._link,
            self._notifier,
            send=self._send,
            pass_on=self._pass,
            download_s=self._intake.download_s,
            clock=clock,
        )
        self._timeout = CoordinatorTimeout(settings.fleet, find_rights)
        self._renewal = Renewal(device.credentials, self.events.put)
        self._manager = service_manager()

    def run(self) -> str:
        """Serve until a request to stop; return its reason."""
        stream = self._device.stream
        try:
            if stream is not None:
                stream.start()
            self._connection.connect()
            while True:
                self._manager.beat(self._clock())
                event = self._next_event()
                if isinstance(event, Stop):
                    return event.reason
                self._handle(event)
                self._tick()
        finally:
            self._manager.stopping()
            self._connection.close()
            self._jobs.close()
            self._device.close()

    def _next_event(self) -> Any:
        due = (
            self._link.wake_at,
            self._participation.wake_at,
            self._enrolling.wake_at,
            self._intake.again_at,
            self._connection.wake_at,
            self._manager.wake_at,
            self._timeout.wake_at,
            self._renewal.wake_at,
        )
        wake_at = min((at for at in due if at is not None), default=None)
        timeout_s = None if wake_at is None else max(0.0, wake_at - self._clock())
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _tick(self) -> None:
        """Do all timed work that is due."""
        self._connection.tick(self._clock())
        self._pass(self._link.tick(self._clock()))
        self._send(self._enrolling.tick(self._clock()))
        self._participation.tick(self._clock())
        if self._timeout.look(self._link, self._clock()):
            self._jobs.run(self._timeout.explain)
        self._ask_again(self._clock())
        self._ask_renewal(self._renewal.tick)

    def _handle(self, event: Any) -> None:
        now = self._clock()
        try:
            match event:
                case Connected():
                    self._greet(now)
                case Disconnected(reason):
                    self._timeout.disconnected()
                    finished = None if self._participation.joined is not None else self._enrolling.finished
                    self._connection.note_lost(reason, now, finished)
                case Received(_, b""):
                    pass  # the broker reports the removal of a retained message
                case Received(topic, data):
                    self._hear(topics.parse(topic).channel, data, now)
                case _:
                    self._note_work(event, now)
        except PacketError as problem:
            log.warning("refused a packet: %s", wire.readable(str(problem)))
        except StoreError as problem:
            log.error("%s", problem)  # noqa: TRY400 - one line

    def _note_work(self, event: Any, now: float) -> None:
        """Handle a result of work in another thread."""
        match event:
            case Progress(fraction):
                self._participation.report_progress(fraction)
            case Joined():
                self._participation.after_join(self._enrolling.joined(event, now))
            case Worked():
                self._participation.after_work(event, now)
            case KeyMade():
                self._ask_renewal(partial(self._renewal.note_made, event))

    def _greet(self, now: float) -> None:
        self._connection.greet()
        self._manager.ready()
        self._timeout.connected()
        self._pass(self._link.reconnected(now))
        self._ask_renewal(self._renewal.resume)

    def _hear(self, channel: str, data: bytes, now: float) -> None:
        if wire.read_pong(data) is not None:
            return  # the answer to this device's second connection, which tests its access rights
        try:
            items = self._link.hear(channel, data, now)
            self._timeout.heard(items)
            self._pass(items)
        except (PacketError, StoreError):
            raise
        except Exception as fault:
            log.error("what came on %r is refused: %s", channel, unexpected(fault))  # noqa: TRY400 - one line
            log.debug("", exc_info=fault)

    def _pass(self, items: Iterable[Item]) -> None:
        """Handle the items that the link returns."""
        for item in items:
            match item:
                case Packet():
                    self._connection.publish(item)
                case Arrived():
                    self._take_in(item)
                case Sent():
                    self._participation.note_sent(item)
                case Answered():
                    self._note_answered(item)
                case wire.Message():
                    self._handle_message(item)

    def _handle_message(self, message: wire.Message) -> None:
        match message:
            case wire.Ping(nonce):
                self._send(wire.Pong(nonce))
            case wire.Lacking(run, reason):
                self._send(self._enrolling.do_without_bundle(run, reason, self._clock()))
            case wire.Finish(run, reason):
                self._finish(run, reason)
            case wire.NotAdmitted(run, reason):
                log.error("run %s does not admit this device: %s", run, wire.readable(reason))
                self._notifier.note(resting=wire.readable(reason))
            case wire.RenewalDue():
                self._ask_renewal(self._renewal.start)
            case wire.Renewed():
                self._renewal.keep(message)
            case wire.NameTaken(instance, wait_s) if instance == self._connection.instance:
                self._connection.wait_for_name(wait_s, self._clock())

    def _note_answered(self, answered: Answered) -> None:
        key = answered.offer.transfer_key
        match answered.receipt:
            case None if key.run == self._enrolling.finished:
                # the coordinator extended the finished run; after joining, it repeats this offer
                self._join(key.run)
            case Ack():
                self._go_on(answered.offer)
            case Refuse(_, reason):
                raise PacketForeign(f"{key.kind} of run {key.run!r}: {reason}")

    def _take_in(self, arrived: Arrived) -> None:
        refusal = self._intake.keep(arrived)
        if refusal is not None:
            self._send(refusal)
            return
        accepted = self._link.accept(arrived)
        self._go_on(arrived.offer)
        self._connection.publish(accepted)

    def _go_on(self, offer: Offer) -> None:
        """Use the payload of this offer, which is now on disk."""
        key = offer.transfer_key
        if key.kind == "enrolment":
            self._enrolling.note_assigned(key.run, offer.ratio)
        if key.kind in ("bundle", "backbone"):
            self._enrolling.note_arrived(key)
        if key.kind in ("enrolment", "bundle", "backbone"):
            self._join(key.run)
        elif self._participation.run == key.run:
            self._participation.work(key, offer.transfer)

    def _join(self, run: str) -> None:
        if self._participation.run == run:
            self._participation.report_ready()
        else:
            self._send(self._enrolling.enrol(run, self._clock()))

    def _ask_again(self, now: float) -> None:
        """Announce this device again once rejected payloads may fit, so that the coordinator repeats its
        offers.
        """
        if self._intake.again_at is not None and now >= self._intake.again_at:
            self._intake.again_at = None
            if self._participation.joined is None:
                self._greet(now)

    def _finish(self, run: str, reason: str) -> None:
        self._send(wire.Left(run))
        store = self._device.store
        if store.enrolment(run).read() is None:
            return
        log.info("run %s is finished: %s", run, wire.readable(reason))
        self._enrolling.finish(run)
        self._participation.finish(run)
        if self._leave_after_run:
            self.events.put(Stop("the run is finished"))
        self._pass(self._link.drop(lambda key: key.run == run, self._clock()))
        store.forget_tasks(run)
        give_back(cycles=True)

    def _ask_renewal(self, step: Callable[[float], Packet | None]) -> None:
        """Take a step of the renewal; if it fails, the present certificate stays."""
        try:
            packet = step(self._clock())
        except FleetuneError as problem:
            log.warning("the certificate is not renewed yet: %s", problem)
            return
        if packet is not None:
            self._connection.publish(packet)

    def _send(self, message: wire.Message | None) -> None:
        if isinstance(message, wire.Decline):
            self._notifier.note(resting=message.reason)
        if message is not None:
            self._connection.publish(self._link.packet(message))
