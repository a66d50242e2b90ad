"""What the devices of a run say and are told: events in, packets to publish out, step after step of the run.

The loop around it is the server's (`coordinator.serving.server`).
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import UNSET

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.rounds.engine_state import NEVER, RoundAttempt
from fleetune.coordinator.rounds.events import Declined, DeviceGone, DeviceReady, RoundsEnded
from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.round_execution import Outcome
from fleetune.coordinator.run.run_events import (
    Happening,
    Moment,
    Notice,
    ReplyDropped,
    RoundClosed,
    RunFinished,
)
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.admission import Admission
from fleetune.coordinator.serving.bundle_server import BundleMade, BundleServer
from fleetune.coordinator.serving.device_sessions import DeviceSession, DeviceSessions
from fleetune.coordinator.serving.duplicate_names import DuplicateNames
from fleetune.coordinator.serving.event_batch import EventBatch
from fleetune.coordinator.serving.event_queue import Timers
from fleetune.coordinator.serving.message_checks import check_decline, check_ready, meet
from fleetune.coordinator.serving.received_replies import take_in
from fleetune.coordinator.serving.rejected_messages import RejectedMessages
from fleetune.coordinator.serving.send_queue import memory_mapped
from fleetune.coordinator.store.broker_outage import Outage, write_outage
from fleetune.coordinator.store.stored_backbone import backbone_payload
from fleetune.coordinator.store.troubles import forget_troubles, note_trouble
from fleetune.coordinator.tasks.assignment import OutgoingTask
from fleetune.protocols.errors import PacketError, PacketForeign, PacketNotFinite, StoreError, TransportError
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.compact_message import is_compact
from fleetune.protocols.wire.inbox import Arrived
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Answered, Item, Packet
from fleetune.protocols.wire.transport import Connected, Disconnected, Received

log = logging.getLogger(__name__)

MAX_REQUESTS = 5  # times that one thing is answered until its device comes again
NO_TRAINER_S = 60.0  # for a device with torch to come
_EXPECTED = {"late", "stale", "duplicate"}  # objections to what an honest device may offer


@dataclass
class Dialogue:
    """What devices say goes to the run controller, tasks go from it to devices.

    Attributes:
        run: the run.
        fleet: its devices listen there.
        publish: takes a topic, what to say there, and whether the broker keeps it for later subscribers.
        put: takes events from other threads, to be handled here.
        observers: told of what happens, once it is durable.
        clock: of the run.
        timer: seconds that never jump, for everything on the wire.
        timers: when each peer wants to be woken, by `timer`.
        peers: devices heard of since the start.
        burst: holds back what is said of steps that are not durable yet.
        outage: of the broker; None: it is reached.
        finished: why the run is over; None: it is not.
    """

    run: Run
    fleet: str
    publish: Callable[[str, bytes, bool], None]
    put: Callable[[Any], None]
    observers: Observers
    clock: Callable[[], float]
    timer: Callable[[], float]
    timers: Timers
    peers: DeviceSessions = field(default_factory=DeviceSessions)
    burst: EventBatch = field(default_factory=EventBatch)
    outage: Outage | None = None
    finished: str | None = None

    def __post_init__(self) -> None:
        self.run_id = self.run.enrolment.run
        self.refusals = RejectedMessages(self.run.controller.count_refused, self.timer)
        self.gate = Admission(self.run.controller, self.peers, self.timer, self._note_muted, self._forget)
        self._bundles = BundleServer(self.run, self.put, self._notice)
        self._names, self._shared = DuplicateNames(), set[str]()  # names that several devices use
        self._hopeless_at: float | None = None  # when a run that no device can train ends
        self._resumed: RoundAttempt | None = None  # whose tasks the last process may have sent

    @property
    def present(self) -> set[str]:
        """Devices that may be connected: members of the run, and others that have come just now."""
        unheard = {device for device in self.run.controller.members if device not in self.peers}
        return unheard | {device for device, peer in self.peers.items() if peer.online}

    @property
    def absent(self) -> set[str]:
        """Members of the run that are not connected."""
        return set(self.run.controller.members) - self.present

    def moment(self) -> Moment:
        """How it is just now."""
        problem = None if self.outage is None else self.outage.words(time.time())
        return Moment(self.clock(), problem, self.peers.activities)

    def wake(self, devices: Iterable[str]) -> None:
        """Their time has come: ask again for what they have not answered."""
        for peer in map(self.peers.__getitem__, devices):
            self._pass(peer, peer.link.tick(self.timer()))

    def resume(self) -> None:
        """Go on with the run where the last process stopped; nothing to do for a new one."""
        controller = self.run.controller
        write_outage(self.run.store, None)  # of the last process
        forget_troubles(self.run.store)
        self._resumed = controller.turn if self.run.resumed else None
        self.follow(controller.resume(self.clock()))
        self.finished = controller.finished  # the last process came so far, but perhaps could not say so

    def _notice(self, line: str) -> None:
        self.observers.tell(Notice(line))

    def handle(self, event: Any) -> None:
        """Something came over the network, or a bundle is made. Raises StoreError."""
        try:
            match event:
                case Connected():
                    self._note_outage(None)
                    for peer in self.peers.values():
                        self._pass(peer, peer.link.reconnected(self.timer()))
                case Disconnected(reason):
                    self._note_outage(reason)
                case Received(topic, data) if (ping := wire.read_ping(data)) is not None:
                    self._answer_ping(topics.parse(topic, with_role=True), data, ping)
                case Received(topic, data):
                    self._receive(topics.parse(topic), data)
                case BundleMade():
                    made = self._bundles.made(event)
                    note_trouble(self.run.store, "bundle", self._bundles.problem_line)
                    for device in made & self.peers.keys():
                        self._give_bundle(self.peers[device], event)
        except PacketError as problem:
            self.refusals.note(problem)

    def _answer_ping(self, address: topics.Address, data: bytes, ping: wire.Ping) -> None:
        """Answer on each channel that the device may read: it tests which it may read and write."""
        if self.gate.lets_in(address, data):
            for channel in (*topics.TO_DEVICE, topics.PROBE):
                topic = topics.topic(self.fleet, address.device, channel)
                self.burst.say(partial(self.publish, topic, wire.encode(wire.Pong(ping.nonce))))

    def _note_outage(self, reason: str | None) -> None:
        """The broker is not reached for this reason; None: it is."""
        if reason is None and self.outage is None:
            return
        if reason is not None:
            log.warning("not connected: %s", reason)
        since = time.time() if self.outage is None else self.outage.since
        self.outage = None if reason is None else Outage(since, reason)
        write_outage(self.run.store, self.outage)

    def _receive(self, address: topics.Address, data: bytes) -> None:
        try:
            if self.gate.lets_in(address, data):
                self._read(address.device, address.channel, data)
        except PacketError as problem:
            self.refusals.note(problem, address.device)
        except (StoreError, TransportError):
            raise
        except Exception as fault:  # noqa: BLE001 - whatever it is, one device must not stop the others
            self.refusals.blame(address.device, fault)

    def _read(self, device: str, channel: str, data: bytes) -> None:
        if channel == "state" and not data:
            return  # a retained presence was cleared
        if channel != "state" and device in self.peers and self.peers[device].second:
            self.run.controller.count_refused("second-device", device=device)
            return
        if channel == "update":
            self._take_chunk(device, data)
            return
        message = wire.read_from_device(data)
        if isinstance(message, wire.Presence) != (channel == "state"):
            raise PacketForeign(f"a {type(message).__name__} does not belong on {channel!r}")
        peer = self.peers.get(device) or meet(self.run, device, self.peers)
        peer.link.compact = is_compact(data)  # it is answered in the form that it speaks
        self._hear(peer, message)

    def _take_chunk(self, device: str, data: bytes) -> None:
        if device not in self.peers:
            raise PacketForeign("a chunk before any offer")
        peer = self.peers[device]
        self._pass(peer, peer.link.take_chunk(data, self.timer()))

    def _hear(self, peer: DeviceSession, message: wire.FromDevice) -> None:
        match message:
            case wire.Presence(online, instance, agent):
                peer.agent = wire.readable(agent)
                self._note_presence(peer, online, instance)
            case Offer() | Resume() | Ack() | Refuse():
                self._pass(peer, peer.link.handle(message, self.timer()))
            case wire.Fetch(run, what) if run == self.run_id:
                self._take_fetch(peer, what)
            case wire.Ready():
                self._take_ready(peer, message)
            case wire.Left(run):
                self._note_left(peer, run)
            case wire.Working() | wire.Measured() if message.run == self.run_id:
                self._hear_of_work(peer, message)
            case wire.Decline(run, number, attempt, reason, diverged) if run == self.run_id:
                check_decline(number, peer, self.run)
                self._note_declined(peer, RoundAttempt(number, attempt), reason, diverged=diverged)

    def _hear_of_work(self, peer: DeviceSession, message: wire.Working | wire.Measured) -> None:
        if isinstance(message, wire.Working):
            peer.stage, peer.progress = message.stage, min(max(message.progress, 0.0), 1.0)
            self._keep_track(peer)
            return
        turn = RoundAttempt(message.round, message.attempt)
        if self.run.controller.awaited_turn(peer.device) == turn:
            peer.measured = message
        else:
            self.run.controller.note_measured(peer.device, turn, message.actual)

    def _note_presence(self, peer: DeviceSession, online: bool, instance: str) -> None:
        if not online and instance != peer.instance:
            return  # the broker says so for an agent that had lost the name already
        wait_s = self._names.connected(peer.device, instance, self.timer()) if online else 0.0
        if online:
            peer.second = wait_s > 0
            self._note_shared(peer.device)
        if wait_s > 0:
            self._publish(peer, Packet("down", wire.NameTaken(instance, wait_s)))
            return
        lost = peer.online and (not online or instance != peer.instance)
        peer.online, peer.instance, peer.stage = online, instance, ""
        if lost:
            self._lose(peer)
        if online:
            peer.asked.clear()
            self._pass(peer, peer.link.reconnected(self.timer()))
            self._enrol(peer)

    def look(self) -> None:
        """Note what time alone changes."""
        self._end_without_trainers()
        for device in self._names.look(self.timer()):
            self._note_shared(device)

    def _end_without_trainers(self) -> None:
        """End a run whose bundle cannot be made when no device that can train has come for a while."""
        problem, state = self._bundles.problem_line, self.run.controller.engine_state
        others = any(peer.online and peer.device not in state.members for peer in self.peers.values())
        if problem is None or state.groups.staying or others or not state.members or state.running:
            self._hopeless_at = None
            return
        now = self.timer()
        self._hopeless_at = self._hopeless_at or now + NO_TRAINER_S
        if now >= self._hopeless_at:
            self.tell(RoundsEnded(f"no device can train: {problem}"))

    def _note_shared(self, device: str) -> None:
        """Note whether several devices use one name."""
        line = (
            f"two devices use the name {device}: the first one keeps it, the other is told to wait; start one"
            " of them with another --device"
        )
        shared = self._names.shared(device)
        if shared == (device in self._shared):
            return
        (self._shared.add if shared else self._shared.discard)(device)
        log.warning("%s", line if shared else f"only one device uses the name {device} now")
        note_trouble(self.run.store, f"name {device}", line if shared else None)

    def _lose(self, peer: DeviceSession) -> None:
        peer.enrolled = False
        self._pass(peer, peer.link.drop(lambda _: True, self.timer()))
        self.tell(DeviceGone(peer.device))

    def _note_muted(self, device: str, muted: bool) -> None:
        peer = self.peers.get(device)
        if peer is not None and muted:
            self._lose(peer)
        elif peer is not None and peer.online:
            self._enrol(peer)

    def _forget(self, device: str) -> None:
        self.peers.forget(device)
        self._names.forget(device)
        self.timers.set(device, None)

    def _enrol(self, peer: DeviceSession) -> None:
        key, ratio = TransferKey("enrolment", self.run_id), self.run.settings.fleet.dealt(peer.device)
        self._pass(peer, peer.link.post(key, self.run.payload, self.timer(), ratio=ratio))

    def _note_left(self, peer: DeviceSession, run: str) -> None:
        """It was told that a run is over, by a coordinator before this one or by a stranger: remove a message
        that the broker still keeps for it (`FinishAnnouncement`), and ask it back if the run goes on.
        """
        self.publish(topics.topic(self.fleet, peer.device, "down"), b"", True)
        if run != self.run_id or self._asks_too_often(peer, "to be told that the run goes on"):
            return
        self.refusals.say(logging.WARNING, peer.device, f"{peer.device} has left a run that goes on")
        self._lose(peer)
        self._enrol(peer)

    def _asks_too_often(self, peer: DeviceSession, what: str, turn: RoundAttempt = NEVER) -> bool:
        """True if a device asked for the same more than `MAX_REQUESTS` times. It is answered again when it
        connects again, or in another turn.
        """
        times = peer.note_asked(what, turn)
        if times <= MAX_REQUESTS:
            return False
        self.run.controller.count_refused("asked-too-often", device=peer.device)
        if times == MAX_REQUESTS + 1:
            line = f"{peer.device} asked {MAX_REQUESTS} times {what}: it is not answered until it comes again"
            self.refusals.say(logging.WARNING, peer.device, line)
        return True

    def _take_fetch(self, peer: DeviceSession, what: str) -> None:
        if self._asks_too_often(peer, f"for the {what}"):
            return
        if what == "bundle":
            self._give_bundle(peer, self._bundles.ask(peer.device))
        else:
            self._give_backbone(peer)

    def _give_bundle(self, peer: DeviceSession, made: BundleMade | None) -> None:
        if made is None:
            return  # it is being made
        if made.payload is None:
            lacking = wire.Lacking(self.run_id, wire.readable(made.problem))
            self._publish(peer, peer.link.packet(lacking))
            return
        key = TransferKey("bundle", self.run_id)
        self._pass(peer, peer.link.post(key, made.payload, self.timer()))

    def _give_backbone(self, peer: DeviceSession) -> None:
        spec = self.run.enrolment.spec
        if spec.backbone is UNSET:
            raise PacketForeign("asks for a backbone; nothing is frozen in the run's model")
        payload = backbone_payload(self.run.folder, spec)
        self._pass(peer, peer.link.post(TransferKey("backbone", self.run_id), payload, self.timer()))

    def _take_ready(self, peer: DeviceSession, ready: wire.Ready) -> None:
        if ready.run != self.run_id:
            return  # of an earlier run; our own enrolment is on its way
        check_ready(ready, peer, self.run)
        self._limit_asking(peer)
        base = None if ready.base is UNSET else ready.base
        self.tell(DeviceReady(ready.report, base, peer.agent))

    def _limit_asking(self, peer: DeviceSession) -> None:
        """Leave a device out of the round that reports ready again and again although it has its task.

        It may report so before its reply: with news, or because it cannot read the task.
        """
        turn = self.run.controller.awaited_turn(peer.device)
        if turn is None or turn != peer.tasked or peer.download_s is None:
            return
        if self._asks_too_often(peer, "for its task", turn):
            self.tell(Declined(peer.device, *turn, f"it asked for its task {MAX_REQUESTS} times"))

    def _note_declined(
        self, peer: DeviceSession, turn: RoundAttempt, reason: str, *, diverged: bool = False
    ) -> None:
        reason, what = wire.readable(reason), f"round {turn.number}" if turn.number else "the run"
        self.refusals.say(logging.WARNING, peer.device, f"{peer.device} declines {what}: {reason}")
        self.tell(Declined(peer.device, *turn, reason, diverged))

    def _note_answered(self, peer: DeviceSession, answered: Answered) -> None:
        match answered.receipt:
            case Resume():
                peer.offered_at = peer.offered_at or self.timer()
            case Refuse(_, reason):
                self._note_refused_offer(peer, answered.offer.transfer_key, reason)

    def _note_refused_offer(self, peer: DeviceSession, key: TransferKey, reason: str) -> None:
        outcomes = self.run.controller.note_refused_offer(peer.device, key, reason, self.clock())
        expected = any(isinstance(one, ReplyDropped) and one.rejection in _EXPECTED for one in outcomes)
        level = logging.INFO if expected else logging.WARNING
        self.refusals.say(level, peer.device, f"{peer.device}: offer refused: {reason}")
        self.follow(outcomes)

    def tell(self, event: Any) -> None:
        """Tell the run controller what happened, and do what follows from it."""
        self.follow(self.run.controller.handle(event, self.clock()))

    def follow(self, outcomes: Iterable[Outcome]) -> None:
        """Do what is left to do outside the run controller."""
        unsent = []
        for outcome in outcomes:
            match outcome:
                case OutgoingTask():
                    try:
                        self._send_task(outcome)
                    except PacketNotFinite as problem:
                        unsent.append(outcome.declined(problem))
                case _:
                    self._note_happening(outcome)
        for declined in unsent:
            log.warning("%s", declined.reason)
            self.tell(declined)

    def _note_happening(self, event: Happening) -> None:
        if isinstance(event, RoundClosed):
            self._forget_old_turns()
        elif isinstance(event, RunFinished):
            self.finished = event.reason
        self.burst.say(partial(self.observers.tell, event))

    def _send_task(self, task: OutgoingTask) -> None:
        peer, turn = self.peers[task.device], RoundAttempt.of(task.transfer_key)
        peer.forget_times()
        self._forget_tasks(peer, lambda key: RoundAttempt.of(key) != turn)
        payload = memory_mapped(task.make(), self.run.folder)
        again = turn in (peer.tasked, self._resumed)
        peer.tasked = turn
        self._pass(peer, peer.link.post(task.transfer_key, payload, self.timer(), perhaps_there=again))

    def _forget_old_turns(self) -> None:
        """Nobody waits any more for what slower devices are still receiving or sending."""
        controller = self.run.controller
        for peer in self.peers.busy():
            awaited = controller.awaited_turn(peer.device)
            if awaited is None or awaited == controller.turn:
                peer.stage = ""
            self._forget_tasks(peer, lambda key, awaited=awaited: RoundAttempt.of(key) != awaited)  # type: ignore[misc]
            self._pass(peer, peer.link.refuse_unwanted())

    def _forget_tasks(self, peer: DeviceSession, unwanted: Callable[[TransferKey], bool]) -> None:
        self._pass(peer, peer.link.drop(lambda key: key.kind == "task" and unwanted(key), self.timer()))

    def _pass(self, peer: DeviceSession, items: Iterable[Item]) -> None:
        for item in items:
            match item:
                case Packet():
                    self._publish(peer, item)
                case Arrived():
                    self._take_in(peer, item)
                case Sent():
                    self._note_sent(peer, item)
                case Answered():
                    self._note_answered(peer, item)
        self._keep_track(peer)

    def _keep_track(self, peer: DeviceSession) -> None:
        """Note when it wants to be woken, and whether anything of it is open."""
        self.timers.set(peer.device, peer.link.wake_at)
        self.peers.note(peer)

    def _take_in(self, peer: DeviceSession, arrived: Arrived) -> None:
        """A reply is here: keep it and tell the engine, then tell the device."""
        refusal, outcomes = take_in(
            peer, arrived, self.run.controller, self.refusals, timer=self.timer, clock=self.clock
        )
        peer.offered_at = None
        link = peer.link
        self._publish(peer, link.accept(arrived) if refusal is None else link.refuse(arrived, refusal))
        self.follow(outcomes)

    def _note_sent(self, peer: DeviceSession, sent: Sent) -> None:
        key = sent.transfer_key
        if sent.refused is not None:
            log.warning("%s does not take its %s", peer.device, key.kind)
            self._note_declined(peer, RoundAttempt.of(key), sent.refused)
            return
        peer.enrolled = peer.enrolled or key.kind == "enrolment"
        if key.kind == "task":
            peer.download_s = sent.seconds
        if key.kind == "task" or sent.sent_bytes:  # an enrolment, bundle or backbone may be there
            self.run.controller.note_delivered(peer.device, key, sent.num_bytes)

    def _publish(self, peer: DeviceSession, packet: Packet) -> None:
        topic = topics.topic(self.fleet, peer.device, packet.channel)
        if packet.is_chunk:
            self.gate.grant(peer.device)  # it acknowledges each
        # Chunks too: some go behind their offer.
        self.burst.say(lambda: self.publish(topic, packet.data, False))
