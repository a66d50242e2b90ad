"""A flood costs its sender and nobody else: what a device may say, how many names are known, what waits."""

import queue

import pytest
from tests.helpers.talk import Coordinating, answered, run_settings

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.serving import admission
from fleetune.coordinator.store.run_folder import INCOMING
from fleetune.protocols.wire.messages import Ack, Offer, Resume, TransferKey
from fleetune.protocols.wire.transfer import Chunk, digest_of, transfer_id
from fleetune.protocols.wire.transport import Connected, Received
from fleetune.protocols.wire.transport.backlog import OVERHEAD_BYTES, Backlog

JUNK = Chunk("0" * 32, 0, b"junk").encode()


@pytest.fixture
def talk(tmp_path):
    """A run of two devices; its clock on the wire is `talk.now`."""
    talk = Coordinating.of(tmp_path, run_settings(start_with=2))
    talk.now = 0.0
    talk.server.parts.admission.timer = lambda: talk.now
    yield talk
    talk.close()


@pytest.fixture
def begun(talk):
    """Both have their task."""
    for device in ("a", "b"):
        talk.greet(device, num_samples=10)
    return talk


def finish_round(talk, *devices):
    turn = talk.run.controller.engine_state.round_attempt
    for device in devices:
        reply = answered(talk.session(device), talk.task(device))
        talk.send(device, TransferKey("update", talk.id, *turn), reply)


def working(talk):
    return wire.Working(talk.id, 1, "training", 0.5)


def test_a_flood_is_dropped_unread_counted_by_device_and_muted_for_a_while(begun, monkeypatch, caplog):
    talk, read, read_from_device = begun, [], wire.read_from_device
    monkeypatch.setattr(wire, "read_from_device", lambda data: read.append(1) or read_from_device(data))
    for _ in range(admission.MESSAGES + 10 * admission.DROPPED):
        talk.hear("a", working(talk))
    assert len(read) <= admission.MESSAGES
    ledger = talk.run.controller.ledger
    surplus = admission.MESSAGES + 10 * admission.DROPPED - len(read)
    assert ledger.refusals == {"surplus": surplus}
    assert ledger.refusals_by_device == {"a": {"surplus": surplus}}
    (line,) = [line for line in caplog.messages if "too many messages" in line]
    assert line.startswith("a ")
    assert f"{admission.THROTTLED_S:g} s" in line
    assert not talk.run.controller.engine_state.members["a"].ready, "no round is started with it"

    talk.hear("b", working(talk))
    assert talk.server.parts.sessions["b"].stage == "training", "others are heard"

    talk.now = admission.THROTTLED_S
    talk.take("a")
    talk.server.parts.admission.look(talk.now, 0)
    assert len([line for line in caplog.messages if line.startswith("a is no longer throttled")]) == 1
    talk.greet("a", num_samples=10)
    finish_round(talk, "a", "b")
    assert talk.run.controller.engine_state.round_attempt.number == 2


def test_a_flood_of_presences_is_dropped_but_nobody_is_muted_for_it(begun, caplog):
    for _ in range(admission.PRESENCES):
        begun.hear("a", wire.Presence(True, "x"), "state")
    begun.take("a")
    begun.hear("a", wire.Presence(True, "y"), "state")
    assert begun.take("a") == []
    assert "too many messages" not in caplog.text
    begun.now = 1.0
    begun.hear("a", wire.Presence(True, "y"), "state")
    assert begun.server.parts.sessions["a"].instance == "y"


def test_chunks_that_were_asked_for_and_their_acknowledgements_cost_nothing(begun):
    talk, payload = begun, bytes(5 * admission.MESSAGES)
    payload = payload[: talk.server.parts.sessions["a"].link.inbox._max_bytes]
    transfer_key = TransferKey("update", talk.id, 1, 1)
    offer = Offer(
        transfer_id(transfer_key, "a", digest_of(payload)), digest_of(payload), len(payload), transfer_key
    )
    talk.task("a")
    talk.hear("a", offer)
    assert isinstance(wire.read_to_device(talk.take("a")[-1][1]), Resume)
    words = talk.server.parts.admission.messages.of("a")
    level = words._level
    for offset in range(len(payload) - 1):
        talk.hear("a", Chunk(offer.transfer, offset, payload[offset : offset + 1]).encode(), "update")
    assert words._level == level, "the window sets their pace"
    for _ in range(10):
        talk.hear("a", Chunk(offer.transfer, 0, payload[:1]).encode(), "update")
        talk.hear("a", JUNK, "update")
    assert words._level == level - 20, "what is there, and what nobody asked for, costs"

    for _ in range(admission.MESSAGES):
        talk.server.parts.admission.messages.of("a").give()
        talk.hear("a", Ack("0" * 32, 1))
    assert words._level == level - 20, "one word for each chunk that it was sent"


def test_made_up_names_are_bounded_and_those_that_are_enrolled_are_kept(begun, monkeypatch, caplog):
    talk = begun
    monkeypatch.setattr(admission, "MAX_UNKNOWN", 100)
    for index in range(1000):
        talk.hear(f"ghost-{index}", wire.Presence(True, "x"), "state")
    strangers = [name for name in talk.server.parts.sessions if name.startswith("ghost")]
    assert len(strangers) <= 100
    assert {"a", "b"} <= talk.server.parts.sessions.keys()
    assert talk.run.controller.ledger.refusals["stranger"] >= 900
    assert len([line for line in caplog.messages if "unknown devices" in line]) == 1
    assert len(talk.server._queue.timers._wanted) <= 102

    talk.now = admission.MIN_SILENCE_S
    talk.hear("ghost-99", working(talk))
    talk.greet("c", num_samples=10)
    assert "c" in talk.run.controller.engine_state.members, "the longest silent made room"
    assert "ghost-0" not in talk.server.parts.sessions
    assert "ghost-97" in talk.server.parts.sessions
    for index in range(1000, 2000):
        talk.now += 1.0
        talk.hear(f"ghost-{index}", b"not even JSON")
    assert len(talk.server.parts.sessions) <= 103
    assert len(talk.server.parts.admission._unknown) <= 100
    finish_round(talk, "a", "b")
    assert talk.run.controller.engine_state.round_attempt.number == 2


def test_a_name_that_was_never_enrolled_leaves_nothing_behind(begun):
    talk, transfer_key = begun, TransferKey("update", begun.id, 1, 1)
    offer = Offer(transfer_id(transfer_key, "ghost", digest_of(b"1")), digest_of(b"1"), 1, transfer_key)
    talk.hear("ghost", offer)
    talk.hear("ghost", Chunk(offer.transfer, 0, b"1").encode(), "update")
    talk.hear("ghost", wire.Decline(talk.id, 0, 0, "no"))
    assert "ghost" not in talk.run.controller.engine_state.members
    assert not (talk.run.folder / INCOMING / "ghost").exists()
    assert "PacketForeign" in talk.run.controller.ledger.refusals


def received(channel, num_bytes):
    topic = f"fleetune/v1/f/a/{channel}"
    return Received(topic, bytes(num_bytes - len(topic) - OVERHEAD_BYTES))


def test_what_waits_for_the_loop_is_bounded_and_chunks_are_let_go_first():
    line = Backlog(10_000)
    for _ in range(30):
        line.put(received("update", 1_000))
    assert line.qsize() == 10
    for _ in range(30):
        line.put(received("up", 1_000))
    assert line.qsize() == 12
    for _ in range(30):
        line.put(received("state", 1_000))
    line.put(Connected())
    assert line.qsize() == 16, "what is no message always has room"
    assert line.take_dropped() == 30 - 10 + 30 - 2 + 30 - 3
    assert line.take_dropped() == 0

    while not line.empty():
        line.get()
    assert line.held_bytes == 0
    with pytest.raises(queue.Empty):
        line.get(timeout=0.0)
    line.put(received("update", 1_000))
    assert line.get() == received("update", 1_000)


def test_dropped_messages_are_counted_and_told_once_in_a_while(begun, caplog):
    for _ in range(3):
        begun.server.parts.admission.look(begun.now, dropped=7)
    assert begun.run.controller.ledger.refusals["overflow"] == 21
    assert len([line for line in caplog.messages if "dropped" in line]) == 1
