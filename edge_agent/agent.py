"""The agent's loop: messages in, messages out; what takes long is done in a thread of its own (jobs.py).

Everything arrives in one queue: what the transport hears, what the jobs come to, the wish to stop.
Nothing is polled: an idle agent sleeps until something happens.
"""

import logging
import queue
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import fleetune.protocols.wire.messages as wire
from fleetune.edge_agent.budget.board_meter import BoardMeter
from fleetune.edge_agent.budget.policy_guard import PolicyGuard
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.edge_agent.probes.channel_rights import ChannelRights
from fleetune.edge_agent.probes.link_speed import LinkSpeed
from fleetune.edge_agent.run.activity import CONNECTED, Activity, Noted
from fleetune.edge_agent.run.coordinator_timeout import COORDINATOR_TIMEOUT_S, CoordinatorTimeout
from fleetune.edge_agent.run.decline import declined
from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.edge_agent.run.enrolling import Enrolling
from fleetune.edge_agent.run.freed_memory import give_back
from fleetune.edge_agent.run.intake import Intake
from fleetune.edge_agent.run.jobs import Jobs, Joined, Progress, Worked
from fleetune.edge_agent.run.joined_run import JoinedRun
from fleetune.edge_agent.run.outage_lines import OutageLines
from fleetune.edge_agent.service.notify import service_manager
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.stream.sample_stream import SampleStream
from fleetune.protocols.errors import (
    BaseUnknown,
    PacketError,
    PacketForeign,
    StoreError,
    TrainingStopped,
    TransportError,
)
from fleetune.protocols.one_line import unexpected
from fleetune.protocols.version import VERSION
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.inbox import Arrived
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, TransferKey
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Answered, Item, Packet, PeerLink
from fleetune.protocols.wire.transport import Connected, Disconnected, EventSink, Received, Transport
from fleetune.protocols.wire.transport.backlog import Backlog

log = logging.getLogger(__name__)

LOOK_EVERY_S = 10.0
SHORTEST_AWAY_S = 1.0
MAX_WAITING_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Stop:
    """Leave cleanly."""

    reason: str


class Agent:
    """A device's part of the dialogue with its coordinator.

    Args:
        settings: of this device.
        make_transport: from the will and the queue of events, a transport that is not connected yet.
        measure_link: asked once a run, when nothing else is under way.
        find_rights: asked when the coordinator is silent for too long; None: nothing is asked.
        meter: of this board.
        make_stream: opens the device's samples, where they come by and by, once its state folder is held.
        leave_after_run: stop when a run is finished, instead of waiting for the next.
        lock: the state folder, held already; None: it is claimed here.
        tell: hears what the agent is at, whenever that changes.
        clock: seconds that never jump.

    Raises:
        SettingError: there is no such board or trainer.
        ModelError: that trainer, or any, is not installed.
        StoreError: the state folder cannot be used, or another agent uses it.
    """

    def __init__(
        self,
        settings: DeviceSettings,
        make_transport: Callable[[bytes, EventSink], Transport],
        *,
        measure_link: Callable[[], LinkSpeed] = LinkSpeed,
        find_rights: Callable[[], ChannelRights] | None = None,
        meter: BoardMeter | None = None,
        make_stream: Callable[[], SampleStream] | None = None,
        leave_after_run: bool = False,
        lock: IO[bytes] | None = None,
        tell: Callable[[Activity], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._meter = meter or BoardMeter()
        self._guard = PolicyGuard(settings.policy, board_named(settings.board), self._meter, clock=clock)
        self._store = AgentStore(settings.state)
        self._lock = self._store.claim() if lock is None else lock
        self._noted = Noted(tell)
        self._clock = clock
        self._leave_after_run = leave_after_run
        self.events = Backlog(MAX_WAITING_BYTES)
        self._instance = uuid.uuid4().hex[:12]
        self._farewell = wire.encode(wire.Presence(False, self._instance))
        self._transport = make_transport(self._farewell, self.events)
        self._outage = OutageLines()
        self._connect_at: float | None = None  # when to try again; None: no other device holds this name
        self._intake = Intake(
            settings.device,
            self._store,
            joined=lambda: None if self._joined is None else self._joined.enrolment.run,
            objection=self._guard.objection,
            clock=clock,
            memory=lambda: self._meter.conditions().memory_bytes,
        )
        self._link = PeerLink(settings.device, "device", self._intake)
        self._jobs = Jobs(self.events.put, clock)
        self._stream = None if make_stream is None else make_stream()
        device = Device(settings, self._store, self._meter, self._guard, measure_link, self._stream)
        self._enrolling = Enrolling(device, self._jobs)
        self._silence, self._find_rights, self._said = CoordinatorTimeout(), find_rights, ""
        self._manager = service_manager()
        self._joined: JoinedRun | None = None
        self._working: TransferKey | None = None
        self._next: tuple[TransferKey, str] | None = None
        self._resting: str | None = None  # why it takes no part just now
        self._look_at: float | None = None

    def run(self) -> str:
        """Serve until told to stop; the reason."""
        try:
            if self._stream is not None:
                self._stream.start()
            self._transport.connect()
            while True:
                self._manager.beat(self._clock())
                event = self._next_event()
                if isinstance(event, Stop):
                    return event.reason
                self._handle(event)
                self._connect_again(self._clock())
                self._pass(self._link.tick(self._clock()))
                self._send(self._enrolling.tick(self._clock()))
                self._look(self._clock())
                if self._silence.look(self._link, self._clock()) and self._find_rights is not None:
                    self._jobs.run(partial(self._explain_silence, self._find_rights))
                self._ask_again(self._clock())
        finally:
            self._manager.stopping()
            self._transport.close(self._farewell)
            self._jobs.close()
            if self._stream is not None:
                self._stream.close()
            self._lock.close()

    def _next_event(self) -> Any:
        due = (
            self._link.wake_at,
            self._look_at,
            self._enrolling.wake_at,
            self._intake.again_at,
            self._connect_at,
            self._manager.wake_at,
            self._silence.wake_at,
        )
        wake_at = min((at for at in due if at is not None), default=None)
        timeout_s = None if wake_at is None else max(0.0, wake_at - self._clock())
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _handle(self, event: Any) -> None:
        now = self._clock()
        try:
            match event:
                case Connected():
                    self._greet(now)
                case Disconnected(reason):
                    self._silence.disconnected()
                    self._note_lost(reason, now)
                case Received(_, b""):
                    pass  # a message that the broker kept for us was removed
                case Received(topic, data):
                    self._hear(topics.parse(topic).channel, data, now)
                case Progress(fraction):
                    self._tell_progress(fraction)
                case Joined():
                    self._after_join(event, now)
                case Worked():
                    self._after_work(event, now)
        except PacketError as problem:
            log.warning("refused a packet: %s", wire.readable(str(problem)))
        except StoreError as problem:
            log.error("%s", problem)  # noqa: TRY400 - one line

    def _note_lost(self, reason: str, now: float) -> None:
        if self._connect_at is not None:
            return  # we left
        finished = None if self._joined is not None else self._enrolling.finished
        if line := self._outage.line(reason, now, finished):
            log.warning("%s", line)
        self._noted.note(connection=f"not connected: {reason}")

    def _give_way(self, wait_s: float) -> None:
        """Leave the broker for a while: each connection of ours ends that of the device that has our name."""
        line = (
            f"another device uses the name {self._settings.device}: this agent tries again in {wait_s:g} s;"
            " give it a name of its own with --device"
        )
        log.warning("%s", line)
        self._connect_at = self._clock() + max(SHORTEST_AWAY_S, wait_s)
        self._transport.close()
        self._noted.note(connection=line)

    def _connect_again(self, now: float) -> None:
        if self._connect_at is not None and now >= self._connect_at:
            self._connect_at = None
            self._transport.connect()

    def _greet(self, now: float) -> None:
        self._outage.connected()
        log.info("connected; fleet %s, device %s", self._settings.fleet, self._settings.device)
        presence = wire.Presence(True, self._instance, f"fleetune {VERSION}")
        self._transport.publish(self._topic("state"), wire.encode(presence), retain=True, qos=1)
        self._manager.ready()
        self._silence.connected()
        self._noted.note(connection=CONNECTED)
        self._pass(self._link.reconnected(now))

    def _hear(self, channel: str, data: bytes, now: float) -> None:
        if wire.read_pong(data) is not None:
            return  # for a second connection of this device, which tests its access rights
        try:
            items = self._link.hear(channel, data, now)
            self._silence.heard(items)
            self._pass(items)
        except (PacketError, StoreError):
            raise
        except Exception as fault:
            log.error("what came on %r is refused: %s", channel, unexpected(fault))  # noqa: TRY400 - one line
            log.debug("", exc_info=fault)

    def _explain_silence(self, find_rights: Callable[[], ChannelRights]) -> None:
        """Say in one line why the coordinator is silent, in the jobs' thread."""
        waited = (
            f"no answer from a coordinator of fleet {self._settings.fleet} for {COORDINATOR_TIMEOUT_S:g} s"
        )
        try:
            rights = find_rights()
        except TransportError as problem:
            said = f"{waited}, and a second connection fails: {problem}"
        else:
            said = "" if rights.problem is None else f"{waited}: {rights.problem}"
            if not (said or rights.has_coordinator) and self._silence.nothing_heard:
                said = f"{waited}; this device joins when one comes. Is the fleet's name right?"
        if said and said != self._said:
            log.warning("%s", said)
        self._said = said

    def _pass(self, items: Iterable[Item]) -> None:
        for item in items:
            match item:
                case Packet():
                    self._publish(item)
                case Arrived():
                    self._take_in(item)
                case Sent():
                    self._note_sent(item)
                case Answered():
                    self._note_answered(item)
                case wire.Ping(nonce):
                    self._send(wire.Pong(nonce))
                case wire.Lacking(run, reason):
                    self._send(self._enrolling.do_without_bundle(run, reason, self._clock()))
                case wire.Finish(run, reason):
                    self._finish(run, reason)
                case wire.NameTaken(instance, wait_s) if instance == self._instance:
                    self._give_way(wait_s)

    def _note_answered(self, answered: Answered) -> None:
        key = answered.offer.transfer_key
        match answered.receipt:
            case None if key.run == self._enrolling.finished:
                self._join(key.run)  # it was not over; then this again
            case Ack():
                self._go_on(answered.offer)
            case Refuse(_, reason):
                raise PacketForeign(f"{key.kind} of run {key.run!r}: {reason}")

    def _is_in(self, run: str) -> bool:
        return self._joined is not None and self._joined.enrolment.run == run

    def _take_in(self, arrived: Arrived) -> None:
        refusal = self._intake.keep(arrived)
        if refusal is not None:
            self._send(refusal)
            return
        accepted = self._link.accept(arrived)
        self._go_on(arrived.offer)
        self._publish(accepted)

    def _go_on(self, offer: Offer) -> None:
        """What this offer brings is on disk: do what it is for."""
        key = offer.transfer_key
        if key.kind == "enrolment":
            self._enrolling.note_dealt(key.run, offer.ratio)
        if key.kind in ("bundle", "backbone"):
            self._enrolling.note_arrived(key)
        if key.kind in ("enrolment", "bundle", "backbone"):
            self._join(key.run)
        elif self._is_in(key.run):
            self._work(key, offer.transfer)

    def _join(self, run: str) -> None:
        if self._is_in(run):
            self._say_ready()
        else:
            self._send(self._enrolling.enrol(run, self._clock()))

    def _after_join(self, event: Joined, now: float) -> None:
        joined = self._enrolling.joined(event, now)
        if isinstance(joined, JoinedRun):
            self._joined = joined
            self._noted.note(run=event.run, round=joined.last_round, finished=None)
            self._say_ready()
        else:
            self._send(joined)

    def _say_ready(self) -> None:
        """Or why not, for the time being."""
        assert self._joined is not None
        run, self._link.compact = self._joined.enrolment.run, self._joined.compact
        self._resting = self._guard.objection() or self._joined.refusal
        if self._resting is None:
            self._joined.note_samples(replied=bool(self._link.outbox))
            self._noted.note(resting=None)
            self._send(self._joined.ready())
        else:
            self._decline(TransferKey("enrolment", run), "resting", TrainingStopped(self._resting))
        if self._guard.is_on or self._resting is not None or self._joined.grows:
            self._look_at = self._clock() + LOOK_EVERY_S
        self._pass(self._link.reconnected(self._clock()))  # the coordinator may be a new process

    def _ask_again(self, now: float) -> None:
        """Whoever greets is enrolled: there may be room by now for what could not be stored."""
        if self._intake.again_at is not None and now >= self._intake.again_at:
            self._intake.again_at = None
            if self._joined is None:
                self._greet(now)

    def _look(self, now: float) -> None:
        """Has the board's state changed so that it takes part again, or no longer?"""
        if self._look_at is None or now < self._look_at:
            return
        self._look_at = None
        if self._joined is None:
            return
        self._look_at = now + LOOK_EVERY_S
        if self._joined.refusal is not None:
            self._joined.try_again()
        idle = self._working is None and not self._link.outbox
        if idle and (
            (self._guard.objection() or self._joined.refusal) != self._resting or self._joined.note_samples()
        ):
            self._say_ready()
        if idle and self._joined.loss_is_due():
            self._jobs.run(self._joined.test_loss)

    def _work(self, key: TransferKey, transfer: str) -> None:
        """Work on a task now or, the newest of them, when the one at hand is done."""
        assert self._joined is not None
        overtaken = self._link.drop(
            lambda waiting: waiting.run != key.run or waiting.turn < key.turn, self._clock()
        )
        self._pass(overtaken)
        if key.update in self._link.outbox.keys or key == self._working:
            return
        if self._working is not None:
            self._next = (key, transfer) if key.turn > self._working.turn else self._next
            return
        try:
            payload = self._store.task(key.run, transfer).read()
        except StoreError as problem:
            self._decline(key, f"round {key.round}", problem)
            return
        if payload is None:
            return  # a late copy of an offer; a newer task has taken its place
        log.info("round %d: training", key.round)
        self._working, joined = key, self._joined
        self._noted.note(round=key.round, training=True, resting=None)
        joined.begin(key, payload, self._intake.download_s(transfer))
        self._jobs.work(key, lambda: joined.work(payload))

    def _after_work(self, event: Worked, now: float) -> None:
        newer, self._working, self._next = self._next, None, None
        self._noted.note(training=newer is not None)
        key = event.key
        if not self._is_in(key.run):
            return
        if newer is not None:
            log.warning("round %d was over before its work was done", key.round)
            self._work(*newer)
            return
        problem = event.reply.exception()
        if isinstance(problem, BaseUnknown):
            assert self._joined is not None
            why_declined = self._joined.membership.why_unread(key)
            if why_declined is None:
                log.info("round %d: %s; asking for all of it", key.round, problem)
                self._say_ready()
                return
            problem = BaseUnknown(why_declined)
        if problem is not None:
            self._decline(key, f"round {key.round}", problem)
            self._look_at = now if self._guard.is_on else self._look_at
            return
        reply = event.reply.result()
        log.info("round %d: done in %.1f s; %d bytes to send", key.round, event.seconds, len(reply))
        assert self._joined is not None
        if self._joined.note_samples(replied=True):  # before the reply, which claims them
            self._send(self._joined.ready())
        self._send(self._joined.measured(key))
        again = self._joined.taken.download_s is None  # another process had its task, and perhaps replied
        self._pass(self._link.post(key.update, reply, now, perhaps_there=again))

    def _note_sent(self, sent: Sent) -> None:
        """Our part of the round is over: learn from it."""
        key = sent.transfer_key
        if sent.refused is not None:
            log.warning("round %d: update not taken: %s", key.round, wire.readable(sent.refused))
            return
        log.info("round %d: update delivered", key.round)
        if self._joined is None or not self._joined.is_at(key):
            return
        self._joined.delivered(sent.seconds)
        self._send(self._joined.measured(key, late=True))
        self._joined.note_samples()
        if self._joined.membership.is_news or self._joined.refusal:
            self._say_ready()

    def _decline(self, key: TransferKey, what: str, problem: BaseException) -> None:
        self._send(declined(key, what, problem))

    def _finish(self, run: str, reason: str) -> None:
        self._send(wire.Left(run))
        if self._store.enrolment(run).read() is None:
            return
        log.info("run %s is finished: %s", run, wire.readable(reason))
        self._enrolling.finish(run)
        if self._is_in(run):
            self._joined, self._next, self._link.compact = None, None, False
        self._noted.note(run=None, resting=None, finished=run)
        if self._leave_after_run:
            self.events.put(Stop("the run is finished"))
        self._pass(self._link.drop(lambda key: key.run == run, self._clock()))
        self._store.forget_tasks(run)
        give_back(cycles=True)

    def _tell_progress(self, fraction: float) -> None:
        if self._working is not None:
            fraction = round(fraction, 2) if self._link.compact else fraction
            self._send(wire.Working(self._working.run, self._working.round, "training", fraction))

    def _send(self, message: wire.Message | None) -> None:
        if isinstance(message, wire.Decline):
            self._noted.note(resting=message.reason)
        if message is not None:
            self._publish(self._link.packet(message))

    def _publish(self, packet: Packet) -> None:
        self._transport.publish(self._topic(packet.channel), packet.data)

    def _topic(self, channel: topics.Channel) -> str:
        return topics.topic(self._settings.fleet, self._settings.device, channel)
