"""A coordinator hears both forms of small messages at any time, and answers in the form a device speaks."""

import msgspec
import pytest
from tests.helpers.talk import Coordinating, answered, run_settings

from fleetune.coordinator.run.enrolment import prepare
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire.messages import Offer, TransferKey
from fleetune.protocols.wire.transfer import Chunk, digest_of, transfer_id

RUN_TOML = {
    "run": {"name": "r"},
    "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
    "method": {"name": "fedavg"},
}


@pytest.fixture
def talk(tmp_path):
    """A run of two devices, both of which have been asked in round 1."""
    talk = Coordinating.of(tmp_path, run_settings(start_with=2, rounds=1))
    for device in ("a", "b"):
        talk.greet(device, num_samples=10)
    yield talk
    talk.close()


def replied(talk, device, *, compact):
    """The device's round; whether the messages to it were compact."""

    def say(message):
        talk.hear(device, wire.encode(message, compact=compact))

    reply = answered(talk.session(device), talk.task(device))
    say(wire.Ready(talk.id, talk.run.enrolment.spec.hash, DeviceReport(device, num_samples=10)))
    cost = RoundCost(bytes_down=100, train_s=1.5, memory_bytes=2**30)
    say(wire.Measured(talk.id, 1, 1, cost, RoundCost(train_s=1.25)))
    key, digest = TransferKey("update", talk.id, 1, 1), digest_of(reply)
    say(Offer(transfer_id(key, device, digest), digest, len(reply), key))
    talk.hear(device, Chunk(transfer_id(key, device, digest), 0, reply).encode(), "update")
    late = RoundCost(upload_s=0.5, joules=3.0)
    all_of_it = msgspec.structs.replace(cost, upload_s=0.5, joules=3.0)
    say(wire.Measured(talk.id, 1, 1, late if compact else all_of_it))
    return {wire.is_compact(data) for topic, data in talk.take(device) if topic.endswith("/down")}


def test_what_a_compact_device_says_is_booked_as_what_another_says(talk):
    assert replied(talk, "a", compact=False) == {False}
    assert replied(talk, "b", compact=True) == {True}
    assert not talk.run.controller.ledger.refusals
    (record,) = talk.run.controller.records()
    at_length, short = (record.devices[device] for device in ("a", "b"))
    assert short.actual == at_length.actual == RoundCost(100, None, None, 1.5, 0.5, 2**30, 3.0)
    assert short.predicted == at_length.predicted == RoundCost(train_s=1.25)


def test_a_device_is_answered_in_json_again_when_it_begins_again(talk):
    assert replied(talk, "b", compact=True) == {True}
    talk.hear("b", wire.Presence(True, "another"), "state")
    offered = [data for topic, data in talk.take("b") if topic.endswith("/down")]
    assert offered
    assert not any(map(wire.is_compact, offered))


def test_a_compact_message_that_makes_no_sense_is_counted(talk):
    for data in (b"\x90", b"\x92\x06\x81\xff", b"\x91\x7f", b"\xc0" * 100):
        talk.hear("a", data)
    assert talk.run.controller.ledger.refusals == {"PacketCorrupt": 4}


def test_an_enrolment_says_nothing_of_it_unless_it_is_wanted(tmp_path):
    plain, compact = (
        prepare(parse_run({**RUN_TOML, "encoding": {"up": "int8", "compact": wanted}}), tmp_path)
        for wanted in (False, True)
    )
    assert (plain.compact, compact.compact) == (msgspec.UNSET, True)
    for one in (plain, compact):
        assert msgspec.to_builtins(one.encoding) == {"up": "int8", "down": "lossless"}
