"""Small messages in their brief form: the same messages, in few bytes, from whoever is known to read them."""

import random
from dataclasses import replace

import msgspec
import pytest

from fleetune.protocols import brief
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.errors import PacketCorrupt, PacketError, PacketTooLarge
from fleetune.protocols.method.choice import DeviceReport, RatioCandidate
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.inbox import Inbox
from fleetune.protocols.wire.incoming_parts import PartMemory
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.peer_link import Packet, PeerLink
from fleetune.protocols.wire.transfer import digest_of, transfer_id

RUN = "fashion-1f2e3d4c"
DIGEST = digest_of(b"fleetune")
COST = RoundCost(120_000, 280, 0.1234, 12.34, 0.2, 123_456_789, 4.2)
REPORT = DeviceReport(
    "pi-kitchen",
    board="raspberry-pi-4b",
    num_samples=500,
    ratio=0.6,
    reason="p = 0.6: as wanted",
    samples_per_s=1234.0,
    round_s=12.3,
    conditions=Conditions(4_123_456_789, "mains", celsius=48.5),
    new_samples=3,
    drift=0.2,
)
FROM_DEVICE = [
    Offer(DIGEST, DIGEST, 8, TransferKey("update", RUN, 3, 1)),
    Resume(DIGEST, 4),
    Ack(DIGEST, 8),
    Refuse(DIGEST, "no"),
    wire.Fetch(RUN, "backbone"),
    wire.Ready(RUN, "7619983568d0c408", REPORT, DIGEST),
    wire.Working(RUN, 1, "training", 0.5),
    wire.Measured(RUN, 1, 1, COST, COST),
    wire.Decline(RUN, 1, 1, "too hot", diverged=True),
    wire.Left(RUN),
    wire.Pong("n"),
]
TO_DEVICE = [
    Offer(DIGEST, DIGEST, 8, TransferKey("task", RUN, 3, 1, True), 1 / 3),
    Resume(DIGEST, 4),
    Ack(DIGEST, 8),
    Refuse(DIGEST, "no"),
    wire.Lacking(RUN, "no torch"),
    wire.Finish(RUN, "done"),
    wire.Ping("n"),
]
BOTH = [(one, wire.read_from_device) for one in FROM_DEVICE] + [
    (one, wire.read_to_device) for one in TO_DEVICE
]


@pytest.mark.parametrize(("message", "read"), BOTH, ids=lambda one: type(one).__name__)
def test_every_message_reads_back_and_is_shorter(message, read):
    data = wire.encode(message, briefly=True)
    assert read(data) == read(wire.encode(message)) == message
    assert len(data) < 0.65 * len(wire.encode(message))
    assert wire.is_brief(data)
    assert not wire.is_brief(wire.encode(message))


def test_what_a_device_affords_reads_back():
    some = RatioCandidate(0.5, 1.25, 1200, 4.2, 0.5, 2.0, 0.75, 1, 1000, 0.25, 0.1)
    report = replace(REPORT, affords=(RatioCandidate(0.1), some), values=(1.0, 0.4), idle_w=2.7)
    message = wire.Ready(RUN, "7619983568d0c408", report, DIGEST)
    data = wire.encode(message, briefly=True)
    assert wire.read_from_device(data) == message
    assert len(data) < 0.65 * len(wire.encode(message))


def test_all_of_a_message_is_in_words():
    found = set()

    def walk(value):
        for key, inner in value.items() if isinstance(value, dict) else ():
            found.add(key)
            walk(inner)

    for message, _ in BOTH:
        walk(msgspec.to_builtins(message))
        found.add(type(message).__name__)
    assert not found - set(brief.WORDS)
    assert {type(one) for one in FROM_DEVICE} == set(wire.FromDevice.__args__) - {wire.Presence}
    assert {type(one) for one in TO_DEVICE} == set(wire.ToDevice.__args__) - {wire.NameTaken}  # always JSON


@pytest.mark.parametrize(
    "data",
    [b"\x01", b"\x01\x01", b"\x02\x01\x80", b"\x00", b"\x01\xff\x80", b"\x01\x01\x91\x00", b"\x01\x02\x80"],
)
def test_what_is_no_message_is_refused(data):
    for read in (wire.read_from_device, wire.read_to_device):
        with pytest.raises(PacketCorrupt):
            read(data)


def test_bounds_hold_briefly():
    for wrong in (Ack("7619", 8), Resume(DIGEST, -1), wire.Left("no run id"), wire.Pong("x" * 101)):
        with pytest.raises(PacketCorrupt):
            wire.read_from_device(wire.encode(wrong, briefly=True))
    with pytest.raises(PacketTooLarge):
        wire.read_from_device(b"\x01" * (wire.MAX_CONTROL_BYTES + 1))
    with pytest.raises(PacketCorrupt):
        wire.read_from_device(wire.encode(Ack(DIGEST, 8), briefly=True) + b"\x00")
    with pytest.raises(PacketCorrupt, match="unknown field"):
        wire.read_from_device(b"\x01\x0b" + brief.write({"run": RUN, "reason": "x"}))


@pytest.mark.parametrize("read", [wire.read_from_device, wire.read_to_device], ids=lambda one: one.__name__)
def test_hostile_bytes_cost_their_sender_a_message(read):
    rng, refused = random.Random(1), 0
    seeds = [wire.encode(one, briefly=True) for one, _ in BOTH]
    for _ in range(4000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(2, len(data))] = rng.randrange(256)
        try:
            read(bytes(data))
        except PacketError:
            refused += 1
    assert refused > 1000


def link(role):
    inbox = Inbox("d", lambda _: PartMemory(), max_bytes=1000, objects=lambda _: None, lacks=lambda _: None)
    return PeerLink("d", role, inbox)


def offer(kind, run=RUN):
    key = TransferKey(kind, run)
    return Offer(transfer_id(key, "d", DIGEST), DIGEST, 8, key)


def test_a_device_answers_a_coordinator_that_enrols_it_in_json():
    device = link("device")
    device.brief = True
    for kind, first in (("task", b"\x01"), ("enrolment", b"{"), ("task", b"{")):
        answer = device.hear("down", wire.encode(offer(kind)), 0.0)[0]
        assert isinstance(answer, Packet)
        assert answer.data[:1] == first


def test_both_forms_are_heard_by_both_sides():
    for role, channel in (("device", "down"), ("coordinator", "up")):
        for briefly in (False, True):
            said = wire.encode(offer("task"), briefly=briefly)
            assert isinstance(link(role).hear(channel, said, 0.0)[0], Packet)
