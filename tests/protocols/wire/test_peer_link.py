"""Two links and a thin wire between them, both ways at once: no socket, no clock, every accident."""

import heapq
import itertools
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetune.protocols.errors import PacketCorrupt, PacketForeign
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.inbox import Arrived, Inbox
from fleetune.protocols.wire.incoming_parts import PartMemory
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Answered, Packet, PeerLink
from fleetune.protocols.wire.transfer import Chunk, digest_of, transfer_id

DEVICE, COORDINATOR = "device", "coordinator"
OTHER = {DEVICE: COORDINATOR, COORDINATOR: DEVICE}
UPDATE, TASK = TransferKey("update", "run", 1, 1), TransferKey("task", "run", 1, 1)


def link(role, *, max_bytes=1 << 20, **wishes):
    inbox = Inbox("pi", lambda _: PartMemory(), max_bytes=max_bytes, **wishes)
    return PeerLink("pi", role, inbox, max_chunk_bytes=8192)


def offer_of(payload, key):
    digest = digest_of(payload)
    return Offer(transfer_id(key, "pi", digest), digest, len(payload), key)


class Side:
    """Who is on one end: what it has, what it was told is there, and what else it heard."""

    def __init__(self, role):
        self.role = role
        self.kept, self.sent, self.heard = {}, [], []
        self.start()

    def start(self):
        """A new process, which has what the one before has kept."""
        self.link = link(self.role, have=lambda offer: offer.transfer_key in self.kept)


class World:
    """Packets between the two, each as late as its fate says, in virtual time."""

    def __init__(self, payloads, fates=()):
        self.now, self.payloads, self.fates = 0.0, payloads, iter(fates)
        self.sides = {role: Side(role) for role in OTHER}
        self.events, self.order = [], itertools.count()
        for role in OTHER:
            self.post(role)

    def post(self, role):
        side = self.sides[role]
        told = {sent.transfer_key for sent in side.sent}
        for key, payload in self.payloads[role].items():
            if key not in told:
                self.do(role, side.link.post(key, payload, self.now))

    def do(self, role, items):
        side = self.sides[role]
        for item in items:
            match item:
                case Packet():
                    for delay_s in next(self.fates, (0.02,)):
                        event = (self.now + delay_s, next(self.order), role, item.channel, item.data)
                        heapq.heappush(self.events, event)
                case Sent():
                    side.sent.append(item)
                case Arrived(offer):
                    assert offer.transfer_key not in side.kept, "once"
                    side.kept[offer.transfer_key] = item.payload()
                    self.do(role, [side.link.accept(item)])
                case _:
                    side.heard.append(item)

    def step(self):
        timers = [(side.link.wake_at, role) for role, side in self.sides.items()]
        at, role = min((one for one in timers if one[0] is not None), default=(float("inf"), None))
        if not self.events and role is None:
            return False
        if self.events and self.events[0][0] <= at:
            self.now, _, sender, channel, data = heapq.heappop(self.events)
            with suppress(PacketForeign):  # a chunk from before a restart
                self.do(OTHER[sender], self.sides[OTHER[sender]].link.hear(channel, data, self.now))
        else:
            self.now = max(self.now, at)
            self.do(role, self.sides[role].link.tick(self.now))
        return True

    def reconnect(self):
        self.events.clear()
        for role, side in self.sides.items():
            self.do(role, side.link.reconnected(self.now))

    def restart(self, role):
        self.sides[role].start()
        self.post(role)
        self.reconnect()

    def finish(self):
        for _ in range(20_000):
            if not self.step():
                return
        raise AssertionError("the dialogue does not end")


def payloads_of(sizes):
    """Each way as many of these, all different."""
    generator = Key.of("link").generator()
    return {
        role: {TransferKey(kind, "run", n, 1): generator.bytes(size) for n, size in enumerate(sizes)}
        for role, kind in ((DEVICE, "update"), (COORDINATOR, "task"))
    }


FATES = st.sampled_from([(0.02,)] * 10 + [(), (0.02, 0.02), (0.5,), (0.001,), (0.02, 3.0)])
ACCIDENTS = st.tuples(st.integers(0, 40), st.sampled_from(["reconnect", DEVICE, COORDINATOR]))


@settings(max_examples=60)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 8192, 60_001]), min_size=1, max_size=3),
    fates=st.lists(FATES, max_size=200),
    accidents=st.lists(ACCIDENTS, max_size=4),
)
def test_what_is_lost_repeated_overtaken_or_cut_off_arrives_once_and_exactly(sizes, fates, accidents):
    world = World(payloads_of(sizes), fates)
    for steps, what in accidents:
        for _ in range(steps):
            world.step()
        world.reconnect() if what == "reconnect" else world.restart(what)
    world.finish()
    for role, other in OTHER.items():
        assert world.sides[other].kept == world.payloads[role]
        assert {sent.transfer_key for sent in world.sides[role].sent} == set(world.payloads[role])
        assert all(sent.refused is None for sent in world.sides[role].sent)


def test_a_quiet_link_sends_no_packet_twice_and_then_sleeps():
    world = World(payloads_of([20_000]))
    world.finish()
    for side in world.sides.values():
        (sent,) = side.sent
        assert sent.sent_bytes == 20_000 + 24 * 3  # chunks of 8192 bytes, a head each
        assert side.link.wake_at is None
    assert world.now < 0.3


@pytest.mark.parametrize(
    ("role", "control", "bulk", "incoming"),
    [(DEVICE, "up", "update", "task"), (COORDINATOR, "down", "task", "update")],
)
def test_each_side_speaks_on_its_own_channels(role, control, bulk, incoming):
    speaking, payload = link(role), b"payload"
    offered, chunk = speaking.post(UPDATE, payload, 0.0)
    assert (offered.channel, offered.is_chunk) == (control, False)
    offer = offered.content
    assert speaking.hear("control", wire.encode(Resume(offer.transfer, 0)), 0.1) == []
    assert (chunk.channel, chunk.is_chunk) == (bulk, True)
    assert chunk.data == Chunk(offer.transfer, 0, payload).encode()
    (sent,) = speaking.handle(Ack(offer.transfer, len(payload)), 0.2)
    assert (sent.transfer_key, sent.refused, sent.seconds) == (UPDATE, None, 0.2)
    theirs = offer_of(payload, TASK)
    speaking.handle(theirs, 0.3)
    (arrived,) = speaking.hear(incoming, Chunk(theirs.transfer, 0, payload).encode(), 0.4)
    assert arrived.payload() == payload


def test_nothing_is_acknowledged_before_it_is_accepted():
    taking, payload = link(DEVICE), b"payload"
    offer = offer_of(payload, TASK)
    resumed, answered = taking.handle(offer, 0.0)
    assert resumed == Packet("up", Resume(offer.transfer, 0))
    assert answered == Answered(offer, Resume(offer.transfer, 0))
    chunk = Chunk(offer.transfer, 0, payload).encode()
    (arrived,) = taking.take_chunk(chunk, 0.1)
    assert isinstance(arrived, Arrived)
    (again,) = taking.handle(offer, 0.2)
    assert isinstance(again, Arrived)
    acknowledged = Packet("up", Ack(offer.transfer, len(payload)))
    assert taking.accept(again) == acknowledged
    assert taking.handle(offer, 0.3) == [acknowledged, Answered(offer, acknowledged.content)]
    assert taking.take_chunk(chunk, 0.4) == []  # a late copy


def test_what_is_refused_after_it_came_is_refused_again_unread():
    taking, payload = link(COORDINATOR), b"payload"
    offer = offer_of(payload, UPDATE)
    taking.handle(offer, 0.0)
    (arrived,) = taking.take_chunk(Chunk(offer.transfer, 0, payload).encode(), 0.1)
    refused = Packet("down", Refuse(offer.transfer, "late"))
    assert taking.refuse(arrived, "late") == refused
    assert taking.handle(offer, 0.2) == [refused, Answered(offer, refused.content)]
    assert taking.inbox.missing_bytes == 0


def test_an_offer_that_nobody_is_ready_for_is_not_answered(monkeypatch):
    taking, offer = link(DEVICE), offer_of(b"payload", TASK)
    monkeypatch.setattr(taking.inbox, "handle_offer", lambda _: None)
    assert taking.handle(offer, 0.0) == [Answered(offer, None)]
    assert taking.take_chunk(Chunk(offer.transfer, 0, b"payload").encode(), 0.0) == []  # came behind it


def test_what_comes_behind_a_refused_offer_is_no_surprise():
    taking, offer = link(COORDINATOR, objects=lambda _: "late"), offer_of(b"payload", UPDATE)
    assert taking.handle(offer, 0.0)[0] == Packet("down", Refuse(offer.transfer, "late"))
    assert taking.take_chunk(Chunk(offer.transfer, 0, b"payload").encode(), 0.0) == []
    with pytest.raises(PacketForeign):
        taking.take_chunk(Chunk("0" * 32, 0, b"payload").encode(), 0.0)


def test_what_is_of_no_payload_comes_back_as_it_is():
    assert link(DEVICE).hear("down", wire.encode(wire.Ping("n")), 0.0) == [wire.Ping("n")]
    assert link(COORDINATOR).hear("up", wire.encode(wire.Pong("n")), 0.0) == [wire.Pong("n")]
    with pytest.raises(PacketCorrupt):  # it is the other side's word
        link(COORDINATOR).hear("up", wire.encode(wire.Ping("n")), 0.0)


def test_what_is_dropped_or_not_wanted_any_more_makes_way():
    over = set()
    both = link(COORDINATOR, objects=lambda key: "over" if key.round in over else None)
    first, second = TransferKey("task", "run", 1, 1), TransferKey("task", "run", 2, 1)
    both.post(first, b"one", 0.0)
    assert both.post(second, b"two", 0.0) == []
    offered, _ = both.drop(lambda key: key.round == 1, 1.0)
    assert offered.content.transfer_key == second
    theirs = offer_of(b"payload", UPDATE)
    both.handle(theirs, 1.0)
    assert both.refuse_unwanted() == []
    over.add(1)
    assert both.refuse_unwanted() == [Packet("down", Refuse(theirs.transfer, "over"))]
