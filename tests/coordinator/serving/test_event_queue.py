"""What waits together is one transaction, told of afterwards; timers and small payloads of many peers."""

import queue

import pytest
from tests.helpers.talk import FLEET, Coordinating, run_settings

import fleetune.protocols.wire.messages as wire
from fleetune.coordinator.serving.event_queue import MAX_EVENTS, EventQueue, Stop, TimerDue, Timers
from fleetune.coordinator.serving.payload_buffer import SMALL_BYTES, MemoryBudget, buffered_parts
from fleetune.protocols.errors import StoreError
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.incoming_parts import part_folder
from fleetune.protocols.wire.messages import Ack, Offer, TransferKey
from fleetune.protocols.wire.pacing import Window
from fleetune.protocols.wire.sender import Sender
from fleetune.protocols.wire.transfer import digest_of, transfer_id
from fleetune.protocols.wire.transport import Received


class Waiting(Coordinating):
    """What devices say waits in the server's queue until it is taken."""

    def hear(self, device, message, channel="up"):
        data = message if isinstance(message, bytes) else wire.encode(message)
        self.server.events.put(Received(topics.topic(FLEET, device, channel), data))

    def serve(self):
        """Handle all that waits, as the loop does; transactions and messages, in order."""
        done = []
        self.run.store._connection.set_trace_callback(
            lambda statement: done.append(statement) if statement == "COMMIT" else None
        )
        self.server._transport.publish = lambda topic, _, **__: done.append(topic.split("/")[-2])
        with self.server.parts.batch.committed(self.run.store):
            self.server._handle_all(self.server._queue.take(0.0))
        return done

    def come(self, devices):
        """They are enrolled, and say all at once that they are ready."""
        for device in devices:
            self.hear(device, wire.Presence(True, "x"), "state")
        self.serve()
        for device in devices:
            offer = self.server.parts.sessions[device].link.outbox._queue[0].offer
            self.hear(device, Ack(offer.transfer, offer.num_bytes))
        self.serve()
        for device in devices:
            self.hear(device, wire.Ready(self.id, self.run.enrolment.spec.hash, DeviceReport(device)))


@pytest.fixture
def talk(tmp_path):
    talk = Waiting.of(tmp_path, run_settings(start_with=40))
    yield talk
    talk.run.store.close()


def test_events_that_wait_together_are_one_transaction_and_told_of_after_it(talk):
    devices = [f"d{index:02}" for index in range(40)]
    talk.come(devices)
    offers_and_tasks = [name for device in devices for name in (device, device)]
    assert talk.serve() == ["COMMIT", *offers_and_tasks]
    assert talk.run.controller.engine_state.participants == tuple(devices)
    assert all(len(peer.link.outbox) == 1 for peer in talk.server.parts.sessions.values()), "its task"


def test_nothing_is_said_of_what_could_not_be_committed(talk, monkeypatch):
    talk.come([f"d{index:02}" for index in range(40)])
    put, calls = talk.run.store.put, []

    def full(*arguments):
        calls.append(arguments)
        if len(calls) > 20:
            raise StoreError("no room")
        put(*arguments)

    monkeypatch.setattr(talk.run.store, "put", full)
    talk.server._transport.publish = None
    with pytest.raises(StoreError), talk.server.parts.batch.committed(talk.run.store):
        talk.server._handle_all(talk.server._queue.take(0.0))
    assert talk.run.store.rows("member") == [], "the steps before it are taken back, too"


def counting(step, seen):
    """`step` of some object, which is noted in `seen`."""

    def noted(self, *arguments, **options):
        seen.append(self)
        return step(self, *arguments, **options)

    return noted


def test_what_a_message_touches_does_not_grow_with_the_fleet(tmp_path, monkeypatch):
    touched = {}
    for size in (10, 100):
        talk = Coordinating.of(tmp_path / str(size), run_settings(start_with=size))
        for index in range(size):
            talk.greet(f"d{index:03}")
        seen = []
        kind = type(talk.server.parts.sessions["d001"].link.outbox)
        for name in ("tick", "drop", "handle", "post"):
            monkeypatch.setattr(kind, name, counting(getattr(kind, name), seen))
        talk.task("d001")
        talk.server._handle_all([TimerDue()])
        talk.hear("d002", wire.Presence(False, "x"), "state")
        touched[size] = len({id(box) for box in seen})
        monkeypatch.undo()
        talk.run.store.close()
    assert touched[10] == touched[100] == 2


def test_a_timer_waits_for_what_was_there_before_it():
    """Else a coordinator that is behind repeats its offers because of answers that it has."""
    line, now = queue.SimpleQueue(), [0.0]
    events = EventQueue(line, lambda: now[0])
    events.timers.set("a", 2.0)
    for number in range(MAX_EVENTS + 3):
        line.put(number)
    now[0] = 5.0
    assert events.take(1.0) == list(range(MAX_EVENTS))
    assert events.take(1.0) == [MAX_EVENTS, MAX_EVENTS + 1, MAX_EVENTS + 2, TimerDue()]
    events.timers.set("a", 9.0)  # one of these was the answer
    assert list(events.due()) == []
    now[0] = 10.0
    assert events.take(1.0) == [TimerDue()]
    assert list(events.due()) == ["a"]
    assert events.take(0.0) == []


def test_nothing_is_taken_after_stop():
    line = queue.SimpleQueue()
    events = EventQueue(line, lambda: 0.0)
    for event in ("a", Stop(), "b"):
        line.put(event)
    assert events.take(1.0) == ["a"]
    assert events.stopped
    assert line.get_nowait() == "b"


def test_timers_wake_each_at_its_latest_time_and_hold_one_entry_for_it():
    timers = Timers()
    for step in range(1000):
        timers.set("a", 10.0 + step)
    timers.set("b", 3.0)
    timers.set("c", 4.0)
    timers.set("c", None)
    assert len(timers._heap) == 3
    assert timers.next_at == 3.0
    assert list(timers.due(5.0)) == ["b"]
    assert list(timers.due(500.0)) == []
    assert timers.next_at == 1009.0
    timers.set("a", 600.0)
    assert list(timers.due(600.0)) == ["a"]
    assert list(timers.due(2000.0)) == []
    assert timers.next_at is None


SIZES = {"one": SMALL_BYTES, "two": 60, "long": SMALL_BYTES + 1}


def test_small_payloads_leave_no_file_and_larger_ones_do(tmp_path):
    room = MemoryBudget(100)
    parts = buffered_parts(part_folder(tmp_path), room)
    offers = [Offer(name, "0" * 32, size, TransferKey("update", "r", 1, 1)) for name, size in SIZES.items()]
    part, other, long = map(parts, offers)
    long.append(b"!")
    assert [path.name for path in tmp_path.iterdir()] == ["long.part"], (
        "it is long: on disk from its first byte"
    )
    long.clear()
    part.append(b"x" * 60)
    assert (part.size, room.left_bytes, list(tmp_path.iterdir())) == (60, 40, [])
    other.append(b"y" * 50)  # no room
    assert [path.name for path in tmp_path.iterdir()] == ["two.part"]
    part.append(b"z" * 60)  # no room either: all of it goes to its file
    assert (part.size, room.left_bytes) == (120, 100)
    assert part.payload() == b"x" * 60 + b"z" * 60
    assert part.digest() == digest_of(part.payload())
    part.append(b"!")
    assert part.size == 121
    again = parts(offers[0])
    assert again.payload() == part.payload(), "a file that was left is gone on with"
    for one in (part, other):
        one.seal()
        one.clear()
    assert list(tmp_path.iterdir()) == []
    assert room.left_bytes == 100


def test_a_payload_that_was_too_large_for_memory_arrives_the_same(tmp_path):
    talk = Coordinating.of(tmp_path, run_settings(start_with=1))
    talk.server.parts.sessions.memory.left_bytes = 0
    talk.greet("a")
    transfer_key = TransferKey("update", talk.id, 1, 1)
    payload = b"no reply at all" * 10
    digest = digest_of(payload)
    talk.hear("a", Offer(transfer_id(transfer_key, "a", digest), digest, len(payload), transfer_key))
    assert isinstance(wire.read_to_device(talk.take("a")[-1][1]), wire.Resume)
    refused = talk.send("a", transfer_key, payload)
    assert not isinstance(refused, Ack)
    assert talk.server.parts.sessions["a"].link.inbox.progress is None
    talk.run.store.close()


def test_an_offer_is_repeated_no_sooner_than_its_peer_takes_to_answer():
    """A coordinator that is behind is not asked twice for what it has; one that was lost is asked at once."""
    window, payload = Window(), b"x" * 100

    def sender(number, now):
        made = Sender("a", TransferKey("update", "r", number, 1), payload, window=window)
        made.start(now)
        return made

    slow = sender(1, 0.0)
    assert slow.wake_at == 2.0
    slow.tick(2.0)
    slow.handle(wire.Resume(slow.offer.transfer, 0), 5.0)
    after = sender(2, 10.0)
    assert after.wake_at == 20.0
    after.handle(wire.Refuse(after.offer.transfer, "late"), 10.5)
    assert sender(3, 20.0).wake_at == 22.0
    lost = sender(4, 30.0)
    assert lost.reconnected(400.0) == [lost.offer]
    lost.handle(wire.Resume(lost.offer.transfer, 0), 400.1)
    assert window.answer_s == pytest.approx(0.1), "time without a connection is no answering time"
