"""Payload transfers against a virtual link: no socket, no clock, every accident."""

import heapq
import itertools
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetune.protocols import disk
from fleetune.protocols.errors import PacketForeign, PacketTooLarge, PacketTruncated, StoreError
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire.inbox import Arrived, Inbox
from fleetune.protocols.wire.incoming_parts import PartFile, PartMemory, part_folder
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.outbox import Outbox, Sent
from fleetune.protocols.wire.pacing import TARGET_QUEUE_S, Window
from fleetune.protocols.wire.sender import MOST_REWINDS, Sender
from fleetune.protocols.wire.transfer import Chunk, Receiver, digest_of, objection, transfer_id

TRANSFER_KEY = TransferKey("update", "run", 3)
MIB = 1 << 20


def payload_of(num_bytes, seed=0):
    return Key.of("payload", seed).generator().bytes(num_bytes)


def offer_of(payload, transfer_key=TRANSFER_KEY, device="pi"):
    digest = digest_of(payload)
    return Offer(transfer_id(transfer_key, device, digest), digest, len(payload), transfer_key)


class Wire:
    """A FIFO link each way between an outbox and an inbox, with a rate and a delay, in virtual time."""

    def __init__(self, payloads, *, folder=None, bits_per_s=1e8, delay_s=0.02, max_chunk_bytes=1 << 18):
        self.now = 0.0
        self.bits_per_s, self.delay_s = bits_per_s, delay_s
        self.folder = folder
        self.max_chunk_bytes = max_chunk_bytes
        self.payloads = payloads
        self.stored = {}
        self.deliveries = []
        self.sent = []
        self.messages = 0
        self.waits = []  # seconds that each packet from the sender waited and took
        self.connected = True
        self._events = []
        self._order = itertools.count()
        self._free_at = {"up": 0.0, "down": 0.0}
        self.accident = lambda _packet: "deliver"
        self.start_sender()
        self.start_receiver()

    def start_sender(self):
        self.outbox = Outbox("pi", self.max_chunk_bytes)
        done = {sent.transfer_key for sent in self.sent}
        for transfer_key, payload in self.payloads.items():
            if transfer_key not in done:
                self.transmit("up", self.outbox.post(transfer_key, payload, self.now))

    def start_receiver(self):
        open_part = part_folder(self.folder) if self.folder else lambda _: PartMemory()
        self.inbox = Inbox("pi", open_part, max_bytes=64 * MIB, have=lambda o: o.transfer_key in self.stored)

    def transmit(self, way, items):
        for item in items:
            if isinstance(item, Sent):
                self.sent.append(item)
            else:
                self._put(way, item)

    def answer(self, outcome):
        if isinstance(outcome, Arrived):
            self.deliveries.append(outcome.offer.transfer_key)
            self.stored[outcome.offer.transfer_key] = outcome.payload()
            outcome = self.inbox.accept(outcome)
        self.transmit("down", [] if outcome is None else [outcome])

    def _put(self, way, item):
        self.messages += 1
        fate = self.accident(item)
        if not self.connected or fate == "lose":
            return
        for _ in range(2 if fate == "repeat" else 1):
            num_bytes = item.num_bytes if isinstance(item, Chunk) else 120
            free_at = max(self._free_at[way], self.now) + 8 * num_bytes / self.bits_per_s
            self._free_at[way] = free_at
            if isinstance(item, Chunk):
                self.waits.append(free_at - self.now)
            data = item.encode() if isinstance(item, Chunk) else item
            heapq.heappush(self._events, (free_at + self.delay_s, next(self._order), way, data))

    def break_connection(self):
        self._events.clear()
        self._free_at = {"up": self.now, "down": self.now}

    def reconnect(self):
        self.break_connection()
        self.transmit("up", self.outbox.reconnected(self.now))

    def step(self):
        """Deliver the next message or run the next timer; False when nothing is left to do."""
        wake_at = self.outbox.wake_at
        if self._events and (wake_at is None or self._events[0][0] <= wake_at):
            self.now, _, way, data = heapq.heappop(self._events)
            self._deliver(way, data)
        elif wake_at is not None:
            self.now = max(self.now, wake_at)
            self.transmit("up", self.outbox.tick(self.now))
        return bool(self._events) or self.outbox.wake_at is not None

    def _deliver(self, way, data):
        if way == "down":
            self.transmit("up", self.outbox.handle(data, self.now))
        elif isinstance(data, Offer):
            self.answer(self.inbox.handle_offer(data))
        else:
            try:
                self.answer(self.inbox.handle_chunk(data, self.now))
            except PacketForeign:
                return

    def finish(self, limit=100_000):
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("deadlock: the transfer does not end")


# The whole story


def test_payloads_arrive_one_after_another():
    payloads = {TransferKey("task", "run", n): payload_of(300_000 * n, n) for n in range(4)}
    wire = Wire(payloads)
    wire.finish()
    assert wire.stored == payloads
    assert wire.deliveries == list(payloads)
    assert [sent.refused for sent in wire.sent] == [None] * 4
    assert all(sent.sent_bytes >= sent.num_bytes for sent in wire.sent)


ACCIDENTS = st.lists(
    st.tuples(
        st.integers(0, 60), st.sampled_from(["reconnect", "restart sender", "restart receiver", "outage"])
    ),
    max_size=6,
)
FATES = st.sampled_from(["deliver"] * 12 + ["lose", "repeat"])


@settings(max_examples=80)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 8192, 100_000, 700_001]), min_size=1, max_size=3),
    accidents=ACCIDENTS,
    fates=st.lists(FATES, max_size=300),
    on_disk=st.booleans(),
)
def test_any_accident_ends_with_the_exact_payload_once(sizes, accidents, fates, on_disk):
    payloads = {TransferKey("update", "run", n): payload_of(size, n) for n, size in enumerate(sizes)}
    with tempfile.TemporaryDirectory() as folder:
        wire = Wire(payloads, folder=Path(folder) if on_disk else None, max_chunk_bytes=32_768)
        fate = iter(fates)
        wire.accident = lambda _: next(fate, "deliver")
        for steps, what in accidents:
            for _ in range(steps):
                wire.step()
            if what == "outage":
                wire.connected = False
                wire.break_connection()
                for _ in range(5):
                    wire.step()
                wire.connected = True
            elif what == "restart sender":
                wire.break_connection()
                wire.start_sender()
            elif what == "restart receiver":
                wire.start_receiver()
            wire.reconnect()
        wire.finish()
        assert wire.stored == payloads
        assert sorted(wire.deliveries, key=lambda transfer_key: transfer_key.round) == list(payloads)
        assert {sent.transfer_key for sent in wire.sent} == set(payloads)
        fair = sum(size // 8192 + 8 for size in sizes) * 2
        assert wire.messages < 6 * fair * (1 + len(accidents)) + 200
        assert not on_disk or not list(Path(folder).glob("*.part"))


def test_a_killed_receiver_goes_on_from_its_part_file(tmp_path):
    payload = payload_of(MIB)
    wire = Wire({TRANSFER_KEY: payload}, folder=tmp_path, bits_per_s=2e6)
    while not list(tmp_path.glob("*.part")) or next(tmp_path.glob("*.part")).stat().st_size < MIB // 2:
        wire.step()
    wire.start_receiver()
    wire.reconnect()
    wire.finish()
    assert wire.stored[TRANSFER_KEY] == payload
    assert wire.sent[0].sent_bytes < 1.2 * MIB


def test_a_sender_without_answer_asks_for_ever_ever_more_slowly():
    sender = Sender("pi", TRANSFER_KEY, b"abc")
    assert sender.start(0.0) == [sender.offer, Chunk(sender.offer.transfer, 0, b"abc")]
    gaps, last = [], 0.0
    for _ in range(50):
        now = sender.wake_at
        assert sender.tick(now - 0.001) == []
        assert sender.tick(now) == [sender.offer]
        gaps.append(now - last)
        last = now
    assert gaps[:5] == [2, 4, 8, 16, 30]
    assert gaps[-1] == 30


# Behind the first offer


@pytest.mark.parametrize(("kind", "delays"), [("task", 1), ("update", 1), ("enrolment", 3)])
def test_a_small_payload_goes_behind_its_offer_if_the_receiver_can_hardly_have_it(kind, delays):
    wire = Wire({TransferKey(kind, "run"): b"x" * 500}, delay_s=0.1, bits_per_s=1e9)
    while not wire.deliveries:
        wire.step()
    assert wire.now == pytest.approx(delays * 0.1, rel=0.01)
    wire.finish()
    assert wire.sent[0].sent_bytes == 524


def test_what_the_receiver_may_have_is_offered_alone():
    outbox = Outbox("pi")
    (offer,) = outbox.post(TRANSFER_KEY, b"abc", 0.0, perhaps_there=True)
    assert isinstance(offer, Offer)
    (chunk,) = outbox.handle(Resume(offer.transfer, 1), 0.1)
    assert (chunk.offset, bytes(chunk.data)) == (1, b"bc")


def test_a_long_payload_goes_on_while_its_first_window_is_acknowledged():
    wire = Wire({TRANSFER_KEY: payload_of(MIB)}, delay_s=0.2, bits_per_s=2e6)
    wire.finish()
    assert wire.stored[TRANSFER_KEY] == payload_of(MIB)
    assert wire.sent[0].sent_bytes == pytest.approx(MIB, rel=0.01)  # nothing twice


def test_a_first_window_that_is_lost_is_sent_again_and_the_next_one_waits_for_its_answer():
    wire = Wire({}, delay_s=0.1)
    wire.accident = lambda packet: "lose" if isinstance(packet, Chunk) and wire.now < 0.1 else "deliver"
    wire.payloads = {TRANSFER_KEY: payload_of(50_000), TransferKey("update", "run", 4): payload_of(100)}
    wire.start_sender()
    while len(wire.sent) < 1:
        wire.step()
    assert 2.0 < wire.now < 8.0
    began = wire.now
    wire.finish()
    assert list(wire.stored.values()) == [payload_of(50_000), payload_of(100)]
    assert wire.sent[1].seconds > 0.39
    assert wire.now == pytest.approx(began + 0.4, rel=0.1)
    wire.outbox.reconnected(wire.now)  # perhaps to another broker
    wire.transmit("up", wire.outbox.post(TransferKey("update", "run", 5), b"abc", wire.now))
    wire.finish()
    assert wire.sent[2].seconds == pytest.approx(0.2, rel=0.1)


def test_a_broker_that_hands_chunks_on_before_their_offer_costs_a_wait_once():
    sender, receiver = Outbox("pi"), Inbox("pi", lambda _: PartMemory(), max_bytes=MIB)
    offer, chunk = sender.post(TRANSFER_KEY, b"abc", 0.0)
    with pytest.raises(PacketForeign):
        receiver.handle_chunk(chunk.encode(), 0.0)
    assert sender.handle(receiver.handle_offer(offer), 0.1) == []
    for _ in range(2):
        (offer,) = sender.tick(sender.wake_at)
        answer = receiver.handle_offer(offer)
        items = sender.handle(answer, sender.wake_at)
    assert [item.data for item in items] == [b"abc"]
    (sent,) = sender.handle(receiver.accept(receiver.handle_chunk(items[0].encode(), 9.0)), 9.0)
    assert sent.refused is None
    assert len(sender.post(TransferKey("update", "run", 4), b"def", 10.0)) == 1


# The window


@pytest.mark.parametrize("mbps", [0.5, 1, 2, 10, 50])
@pytest.mark.parametrize("delay_s", [0.001, 0.04])
def test_a_control_message_waits_little_and_the_link_never_idles(mbps, delay_s):
    num_bytes = min(int(mbps * 1e6 / 8 * 30), 32 * MIB)
    wire = Wire({TRANSFER_KEY: payload_of(num_bytes)}, bits_per_s=mbps * 1e6, delay_s=delay_s)
    wire.finish()
    assert max(wire.waits) < 0.5
    assert sorted(wire.waits)[len(wire.waits) // 2] < 0.3
    assert wire.sent[0].goodput_bps > 0.9 * mbps * 1e6


def test_a_fast_link_gets_whole_chunks():
    wire = Wire({TRANSFER_KEY: payload_of(48 * MIB)}, bits_per_s=2e9, delay_s=0.0005)
    wire.finish()
    assert wire.messages < 2.5 * 48 * 4
    assert wire.sent[0].goodput_bps > 0.5e9


def test_the_window_stays_within_its_bounds():
    window = Window(max_chunk_bytes=128 * 1024)
    window.observe(0.01)
    for _ in range(20):
        window.adjust(0.01)
    assert (window.limit_bytes, window.chunk_bytes) == (16 * 128 * 1024, 128 * 1024)
    for _ in range(20):
        window.adjust(3.0)
    assert (window.limit_bytes, window.chunk_bytes) == (16 * 1024, 8 * 1024)
    assert window.base_s == 0.01
    assert TARGET_QUEUE_S < 0.25


def test_a_restart_after_loss_does_not_mistake_old_acknowledgements_for_fast_ones():
    window = Window()
    sender = Sender("pi", TRANSFER_KEY, payload_of(100_000), window=window)
    transfer = sender.offer.transfer
    sender.start(0.0)
    sender.handle(Resume(transfer, 0), 0.6)
    sender.handle(Resume(transfer, 8192), 1.2)  # the second chunk was lost: sent again now
    sender.handle(Ack(transfer, 16384), 1.201)  # ... but this one was sent at 0.6
    assert window.base_s == pytest.approx(0.6)


# Each side alone


def streaming_sender(payload):
    sender = Sender("pi", TRANSFER_KEY, payload)
    _, *chunks = sender.start(0.0)
    assert sender.handle(Resume(sender.offer.transfer, 0), 0.1) == []
    return sender, chunks


def test_a_late_copy_of_resume_sends_nothing_twice():
    sender, chunks = streaming_sender(payload_of(50_000))
    assert len(chunks) == 2
    assert sender.handle(Resume(sender.offer.transfer, 0), 0.2) == []


def test_a_receiver_that_goes_back_again_and_again_is_given_up():
    sender, _ = streaming_sender(payload_of(50_000))
    for offset in (100, 200, 300):  # gaps, ever further
        assert sender.handle(Resume(sender.offer.transfer, offset), 0.2)
    for times in range(MOST_REWINDS):
        assert sender.handle(Resume(sender.offer.transfer, 100 + times % 2), 0.3)
    assert sender.handle(Resume(sender.offer.transfer, 102), 0.4) == []
    assert sender.refused == "it went back 5 times to bytes that it had asked for before"
    assert sender.wake_at is None


def test_a_receiver_may_start_over_after_each_offer():
    sender, _ = streaming_sender(payload_of(50_000))
    for times in range(10 * MOST_REWINDS):
        sender.reconnected(float(times))
        assert sender.handle(Resume(sender.offer.transfer, 0), times + 0.5)
    assert not sender.ended


def test_nonsense_from_the_receiver_is_ignored():
    sender, _ = streaming_sender(payload_of(50_000))
    for offset in (-1, 50_001, 10**30):
        assert sender.handle(Ack(sender.offer.transfer, offset), 1.0) == []
        assert sender.handle(Resume(sender.offer.transfer, offset), 1.0) == []
    assert sender.handle(Ack("0" * 32, 50_000), 1.0) == []
    assert not sender.ended


def test_a_refused_payload_ends_with_the_reason_and_the_next_begins():
    outbox = Outbox("pi")
    [offer, _] = outbox.post(TRANSFER_KEY, b"one", 0.0)
    assert outbox.post(TRANSFER_KEY, b"one", 0.0) == []
    assert outbox.post(TransferKey("update", "run", 4), b"two", 0.0) == []
    [sent, following, _] = outbox.handle(Refuse(offer.transfer, "no"), 1.5)
    assert (sent.refused, sent.seconds, sent.transfer_key) == ("no", 1.5, TRANSFER_KEY)
    assert following.transfer_key.round == 4
    assert outbox.drop(lambda transfer_key: transfer_key.round == 4, 2.0) == []
    assert (len(outbox), outbox.wake_at) == (0, None)


def test_a_gap_is_asked_for_once_and_overlaps_are_cut():
    payload = payload_of(40_000)
    receiver = Receiver(offer_of(payload), PartMemory())
    transfer = receiver.offer.transfer
    assert receiver.handle_offer(receiver.offer) == Resume(transfer, 0)

    def take(start, end):
        return receiver.handle_chunk(Chunk(transfer, start, payload[start:end]), 0.0)

    assert take(0, 10_000) == Ack(transfer, 10_000)
    assert take(20_000, 30_000) == Resume(transfer, 10_000)
    assert take(30_000, 40_000) is None
    assert take(5_000, 20_000) == Ack(transfer, 20_000)
    assert take(0, 10_000) == Ack(transfer, 20_000)
    assert take(20_000, 40_000) == Ack(transfer, 40_000)
    assert receiver.complete
    assert receiver.part.payload() == payload
    assert take(0, 10_000) == Ack(transfer, 40_000)
    with pytest.raises(PacketTooLarge):
        receiver.handle_chunk(Chunk(transfer, 39_999, b"xx"), 0.0)


def test_a_wrong_digest_starts_over_and_is_refused_the_third_time():
    offer = offer_of(b"right")
    receiver = Receiver(offer, PartMemory())
    wrong = Chunk(offer.transfer, 0, b"wrong")
    assert receiver.handle_chunk(wrong, 0.0) == Resume(offer.transfer, 0)
    assert receiver.handle_chunk(wrong, 0.0) == Resume(offer.transfer, 0)
    assert isinstance(receiver.handle_chunk(wrong, 0.0), Refuse)
    assert (receiver.part.size, receiver.complete) == (0, False)


@pytest.mark.parametrize("num_bytes", [-1, 1001, 2**63, 10**40])
def test_a_length_beyond_the_limit_is_refused_before_a_part_is_made(num_bytes):
    digest = digest_of(b"x")
    offer = Offer(transfer_id(TRANSFER_KEY, "pi", digest), digest, num_bytes, TRANSFER_KEY)
    inbox = Inbox("pi", lambda _: pytest.fail("a part was made"), max_bytes=1000)
    assert isinstance(inbox.handle_offer(offer), Refuse)


def test_an_offer_under_a_foreign_id_is_refused():
    good = offer_of(b"abc")
    assert objection(good, "pi", 10) is None
    assert objection(good, "other", 10) is not None
    for transfer in ("../../etc/passwd", "0" * 32, good.transfer.upper(), ""):
        assert objection(Offer(transfer, good.digest, 3, TRANSFER_KEY), "pi", 10) is not None
    assert objection(Offer(good.transfer, "../x", 3, TRANSFER_KEY), "pi", 10) is not None
    receiver = Receiver(good, PartMemory())
    assert isinstance(receiver.handle_offer(Offer(good.transfer, good.digest, 4, TRANSFER_KEY)), Refuse)


def test_an_inbox_answers_again_what_it_has_and_refuses_what_it_does_not_want():
    offer = offer_of(b"abc")
    inbox = Inbox("pi", lambda _: PartMemory(), max_bytes=10)
    assert inbox.handle_offer(offer) == Resume(offer.transfer, 0)
    packet = Chunk(offer.transfer, 0, b"abc").encode()
    first, second = inbox.handle_chunk(packet, 0.0), inbox.handle_offer(offer)
    for arrived in (first, second):  # not accepted yet: the caller gets it again
        assert arrived.payload() == b"abc"
    assert inbox.accept(second) == Ack(offer.transfer, 3)
    assert inbox.handle_offer(offer) == Ack(offer.transfer, 3)
    assert inbox.handle_chunk(packet, 0.0) is None  # a late copy
    after_restart = Inbox("pi", lambda _: PartMemory(), max_bytes=10, have=lambda o: o == offer)
    assert after_restart.handle_offer(offer) == Ack(offer.transfer, 3)
    stale = Inbox("pi", lambda _: PartMemory(), max_bytes=10, objects=lambda _: "round 3 is over")
    assert stale.handle_offer(offer) == Refuse(offer.transfer, "round 3 is over")


def test_an_inbox_gives_up_what_is_not_wanted_any_more():
    wanted, unwanted = offer_of(b"abc"), offer_of(b"abc", TransferKey("update", "run", 2))
    over = set()

    def objects(key):
        return f"round {key.round} is over" if key.round in over else None

    inbox = Inbox("pi", lambda _: PartMemory(), max_bytes=10, objects=objects)
    inbox.handle_offer(unwanted)
    inbox.handle_chunk(Chunk(unwanted.transfer, 0, b"a").encode(), 0.0)
    inbox.handle_offer(wanted)
    assert inbox.refuse_unwanted() == []
    over.add(2)
    refusal = Refuse(unwanted.transfer, "round 2 is over")
    assert inbox.refuse_unwanted() == [refusal]
    assert inbox.refuse_unwanted() == []
    assert inbox.handle_chunk(Chunk(unwanted.transfer, 1, b"b").encode(), 0.0) is None
    assert inbox.handle_offer(unwanted) == refusal
    assert inbox.handle_chunk(Chunk(wanted.transfer, 0, b"a").encode(), 0.0) == Ack(wanted.transfer, 1)
    with pytest.raises(PacketForeign):
        inbox.handle_chunk(Chunk("0" * 32, 0, b"a").encode(), 0.0)


def test_a_peer_that_opens_many_transfers_holds_few_parts(tmp_path):
    inbox = Inbox("pi", part_folder(tmp_path), max_bytes=10)
    for n in range(20):
        offer = offer_of(b"abc", TransferKey("update", "run", n))
        inbox.handle_offer(offer)
        inbox.handle_chunk(Chunk(offer.transfer, 0, b"a").encode(), 0.0)
    assert len(list(tmp_path.glob("*.part"))) == 4


@given(st.binary(max_size=100))
def test_no_packet_crashes_the_chunk_reader(packet):
    try:
        chunk = Chunk.decode(packet)
    except PacketTruncated:
        assert len(packet) <= 24
    else:
        assert chunk.encode() == packet


def test_a_chunk_beyond_the_limit_is_refused():
    with pytest.raises(PacketTooLarge):
        Chunk.decode(bytes(MIB + 25))


# Parts


def test_a_full_disk_is_one_line_and_keeps_what_was_there(tmp_path, monkeypatch):
    part = PartFile(tmp_path / "x.part")
    part.append(b"abc")
    append = disk.DISK.append

    def full(path, data):
        append(path, data[:1])  # the disk took a part of it
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.DISK, "append", full)
    with pytest.raises(StoreError, match="No space left"):
        part.append(b"defgh")
    monkeypatch.undo()
    assert PartFile(part.path).payload() == b"abc"
    part.append(b"def")
    assert (part.payload(), part.digest()) == (b"abcdef", digest_of(b"abcdef"))


def test_parts_of_earlier_processes_are_swept_but_for_the_latest(tmp_path):
    for n in range(6):
        path = tmp_path / f"{n:032x}.part"
        path.write_bytes(b"x" * n)
        os.utime(path, (n, n))
    open_part = part_folder(tmp_path, keep=2)
    assert sorted(path.stat().st_size for path in tmp_path.glob("*.part")) == [4, 5]
    latest = Offer(f"{5:032x}", "0" * 32, 9, TRANSFER_KEY)
    assert open_part(latest).size == 5
