"""Over MQTT too, each reason to refuse a reply or a task, with its retry, costs a few messages."""

import queue
from collections import Counter, defaultdict

import pytest
from tests.helpers.fleet_processes import PATIENCE_S, Fleet, run_toml
from tests.helpers.hostile_fleet import FORGERS, LOST

from fleetune.protocols.errors import PacketError
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.messages import Offer, Ready
from fleetune.protocols.wire.transport import Connected, Received
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport

pytestmark = [pytest.mark.fleet, pytest.mark.nightly]

METHODS = ("fedavg", "fedspu", "fedpurin", "kapc", "srp-pfed", "dc-pfl")
KINDS = (*FORGERS, LOST)
MOST_TASKS = 2  # different payloads of one task: a difference, and all of it
MOST_MESSAGES = 60  # of one device in one attempt, both directions, chunks aside


class Listener:
    """Hears all small messages of a fleet.

    Attributes:
        tasks: payloads of tasks that were offered, by device, round and attempt.
        messages: how many messages passed while a device's latest task was this.
        asks: how often a device said that it is ready.
    """

    def __init__(self, fleet):
        self.tasks, self.messages, self.asks = defaultdict(set), Counter(), Counter()
        self._latest = {}
        self._events = queue.SimpleQueue()
        self._transport = MqttTransport(
            Broker("127.0.0.1", fleet.port),
            "listener",
            subscriptions=[f"fleetune/v1/{fleet.name}/+/{channel}" for channel in ("up", "down")],
            events=self._events,
        )

    def __enter__(self):
        self._transport.connect()
        assert isinstance(self._events.get(timeout=PATIENCE_S), Connected)
        return self

    def __exit__(self, kind, problem, trace):
        self._transport.close()
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, Received):
                self._count(event)

    def _count(self, event):
        address = topics.parse(event.topic)
        read = wire.read_from_device if address.channel == "up" else wire.read_to_device
        try:
            message = read(event.data)
        except PacketError:
            return
        if isinstance(message, Ready):
            self.asks[address.device] += 1
        if isinstance(message, Offer) and message.transfer_key.kind == "task":
            turn = address.device, *message.transfer_key.round_attempt
            self._latest[address.device] = turn
            self.tasks[turn].add(message.transfer)
        if address.device in self._latest:
            self.messages[self._latest[address.device]] += 1


@pytest.mark.parametrize("method", METHODS)
def test_every_reason_to_refuse_costs_a_few_messages(tmp_path, method):
    rounds = len(KINDS) + 3
    toml = run_toml(method=method, rounds=rounds, quorum=3, deadline_s=2) + '[encoding]\nup = "raw"\n'
    with Fleet(tmp_path, toml) as fleet:
        fleet.start_coordinator()
        with Listener(fleet) as listener:
            for device in ("device-0", "device-2"):
                fleet.start_agent(device)
            hostile = fleet.start_agent(
                "device-1", program="tests.helpers.hostile_agent", FORGED=",".join(KINDS)
            )
            fleet.coordinator.wait_for("finished: ")  # most of the time is deadlines
            fleet.wait_finished()
        refused = fleet.summary()["refused"]
        assert len(hostile.lines("asking the coordinator for the whole task")) == 1
        assert not hostile.lines("Traceback")
    assert fleet.coordinator.lines(rf"round {rounds}/{rounds}")
    assert refused["abandoned-too-few"] >= len(FORGERS) - 1  # random values are as plausible as others
    assert max(map(len, listener.tasks.values())) <= MOST_TASKS
    assert max(listener.messages.values()) <= MOST_MESSAGES
    assert {turn[1] for turn in listener.tasks} >= set(range(1, rounds + 1))
