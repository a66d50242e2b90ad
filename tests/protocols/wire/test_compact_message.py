"""Control messages in the compact form: the same messages in fewer bytes."""

import random
from dataclasses import replace

import msgspec
import pytest

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
    data = wire.encode(message, compact=True)
    assert read(data) == read(wire.encode(message)) == message
    assert len(data) < 0.7 * len(wire.encode(message))
    assert wire.is_compact(data)
    assert not wire.is_compact(wire.encode(message))


def test_what_a_device_affords_reads_back():
    some = RatioCandidate(0.5, 1.25, 1200, 4.2, 0.5, 2.0, 0.75, 1, 1000, 0.25, 0.1)
    report = replace(REPORT, affords=(RatioCandidate(0.1), some), values=(1.0, 0.4), idle_w=2.7)
    message = wire.Ready(RUN, "7619983568d0c408", report, DIGEST)
    data = wire.encode(message, compact=True)
    assert wire.read_from_device(data) == message
    assert len(data) < 0.7 * len(wire.encode(message))


def test_every_message_has_a_compact_form_except_those_from_before_a_run():
    always_json = {wire.NameTaken, wire.NotAdmitted, wire.RenewalDue, wire.Renewed}
    assert {type(one) for one in FROM_DEVICE} == set(wire.FromDevice.__args__) - {wire.Presence, wire.Renew}
    assert {type(one) for one in TO_DEVICE} == set(wire.ToDevice.__args__) - always_json
    for message in (wire.Presence(True, "x"), wire.NameTaken("x", 1.0), wire.NotAdmitted(RUN, "why")):
        with pytest.raises(ValueError, match="not in"):
            wire.encode(message, compact=True)


def test_defaults_at_the_end_are_left_out_and_null_stands_for_others():
    late = wire.Measured(RUN, 1, 2, RoundCost(upload_s=0.5, joules=4.0))
    values = msgspec.msgpack.decode(wire.encode(late, compact=True))
    assert values == [8, RUN, 1, 2, [None, None, None, None, 0.5, None, 4.0]]
    assert wire.read_from_device(msgspec.msgpack.encode(values)) == late


@pytest.mark.parametrize(
    "values",
    [
        *(None, 7, {}, [], [99], ["Ack", DIGEST, 8], [2], [2, DIGEST], [2, DIGEST, 8, 9], [2, [DIGEST], 8]),
        *([2, "7619", 8], [1, DIGEST, -1], [11, "no run id"], [13, "x" * 101], [11, None]),
        [5, RUN, "only a coordinator sends it, and only a device reads it", 1],
    ],
    ids=str,
)
def test_what_is_no_message_is_refused(values):
    for read in (wire.read_from_device, wire.read_to_device):
        with pytest.raises(PacketCorrupt):
            read(msgspec.msgpack.encode(values))


def test_messages_of_the_other_side_damaged_and_long_ones_are_refused():
    for message, read in [
        (wire.Finish(RUN, "done"), wire.read_from_device),
        (wire.Left(RUN), wire.read_to_device),
    ]:
        with pytest.raises(PacketCorrupt):
            read(wire.encode(message, compact=True))
    good = wire.encode(Ack(DIGEST, 8), compact=True)
    for data in (good[:-1], good + b"\x00", b"\xc1", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(PacketCorrupt):
            wire.read_from_device(data)
    with pytest.raises(PacketTooLarge):
        wire.read_from_device(b"\x93" * (wire.MAX_CONTROL_BYTES + 1))


@pytest.mark.parametrize("read", [wire.read_from_device, wire.read_to_device], ids=lambda one: one.__name__)
def test_hostile_bytes_cost_their_sender_a_message(read):
    rng, refused = random.Random(1), 0
    seeds = [wire.encode(one, compact=True) for one, _ in BOTH]
    for _ in range(4000):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 2, 8))):
            data[rng.randrange(len(data))] = rng.randrange(256)
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
    device.compact = True
    for kind, compact in (("task", True), ("enrolment", False), ("task", False)):
        answer = device.hear("down", wire.encode(offer(kind)), 0.0)[0]
        assert isinstance(answer, Packet)
        assert wire.is_compact(answer.data) is compact


def test_both_forms_are_heard_by_both_sides():
    for role, channel in (("device", "down"), ("coordinator", "up")):
        for compact in (False, True):
            said = wire.encode(offer("task"), compact=compact)
            assert isinstance(link(role).hear(channel, said, 0.0)[0], Packet)
