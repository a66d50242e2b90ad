"""Somebody on an open broker tells a device that its run is over: it comes back, and the run goes on with it.

A real server and a real agent over a broker in this process; the forger speaks when it hears its cue.
"""

import threading
import time
from types import SimpleNamespace

import pytest
from tests.helpers.nightly import sooner

from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.run_events import Moment
from fleetune.coordinator.serving.event_queue import Stop
from fleetune.coordinator.serving.server import Server
from fleetune.edge_agent import agent as agent_side
from fleetune.edge_agent.agent import Agent
from fleetune.edge_agent.run import first_ratio, memory_room, run_backend
from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.transport import Received, Will
from fleetune.protocols.wire.transport.memory import MemoryBroker

FLEET, DEVICE, ROUNDS = "forged", "a", 3
PATIENCE_S = 60
SETTINGS = parse_run(
    {
        "run": {"name": FLEET, "rounds": ROUNDS},
        "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
        "method": {"name": "fedavg"},
        "round": {"start_with": 1},
    }
)


def on(channel):
    return topics.topic(FLEET, DEVICE, channel)


class Forger:
    """Says that the run is over when somebody says what it waits for, the first `times`.

    Attributes:
        forged: how often it did.
        left: how often the device said that it knows.
    """

    def __init__(self, broker, run, wanted, times):
        self._run, self._wanted, self._times = run, wanted, times
        self.forged, self.left = 0, 0
        self._transport = broker.client([on("up"), on("down")], self)
        self._transport.connect()

    def put(self, event):
        if not isinstance(event, Received) or not event.data:
            return
        read = wire.read_from_device if event.topic == on("up") else wire.read_to_device
        message = read(event.data)
        self.left += isinstance(message, wire.Left)
        if self.forged < self._times and self._wanted(message):
            self.forged += 1
            self._transport.publish(on("down"), wire.encode(wire.Finish(self._run, "forged")))


@pytest.fixture(autouse=True)
def small_process(monkeypatch):
    """A process that has run a thousand tests holds more than a board has."""
    for module in (first_ratio, memory_room, run_backend):
        monkeypatch.setattr(module, "process_memory", lambda: SimpleNamespace(resident=250_000_000))


@pytest.fixture
def world(tmp_path):
    """A run with its server, and an agent in a thread that has begun when `begin` returns."""
    run, broker = open_run(SETTINGS, tmp_path / "run", durable=False), MemoryBroker()
    give_up_at, threads = time.monotonic() + PATIENCE_S, []

    class Looking:
        def observe(self, event):
            if isinstance(event, Moment):
                look()

    def look():
        if time.monotonic() > give_up_at or (threads and not threads[0].is_alive()):
            server.events.put(Stop())

    def transport_of(will, events):
        return broker.client(topics.device_subscriptions(FLEET, DEVICE), events, Will(on("state"), will))

    def begin(**options):
        settings = DeviceSettings(
            fleet=FLEET, device=DEVICE, state=tmp_path / "state", data="digits", trainer="torch"
        )
        made.agent = Agent(Device.opened(settings), transport_of, **options)
        threads.append(threading.Thread(target=lambda: made.reasons.append(made.agent.run())))
        threads[0].start()

    subscriptions = topics.coordinator_subscriptions(FLEET)
    server = Server(
        run, FLEET, lambda events: broker.client(subscriptions, events), observers=Observers([Looking()])
    )
    made = SimpleNamespace(run=run, broker=broker, server=server, begin=begin, reasons=[])
    yield made
    made.agent.events.put(agent_side.Stop("the test is over"))
    threads[0].join()
    run.store.close()


def is_offer(kind, number=0):
    def wanted(message):
        return isinstance(message, wire.Offer) and (
            message.transfer_key.kind,
            message.transfer_key.round,
        ) == (
            kind,
            number,
        )

    return wanted


MOMENTS = {
    "ready": lambda message: isinstance(message, wire.Ready),
    "asked": is_offer("task", 1),
    "works": lambda message: isinstance(message, wire.Working),
    "worked": lambda message: isinstance(message, wire.Measured),
    "replies": is_offer("update", 2),
    "rehearses": is_offer("task", ROUNDS + 1),
}


@pytest.mark.parametrize("moment", sooner(MOMENTS, kept=("works", "replies")))
def test_a_device_that_was_told_wrongly_that_the_run_is_over_comes_back_and_works(world, moment):
    # It says that it works now and then only; an update is there when its offer is, and not offered again.
    times = 1 if moment in ("works", "replies") else 3
    forger = Forger(world.broker, world.run.enrolment.run, MOMENTS[moment], times)
    world.begin()
    assert world.server.serve() is not None
    assert forger.forged == times
    assert forger.left > times  # each time, and when it was true
    assert [sorted(record.devices) for record in world.run.controller.records()][:ROUNDS] == [
        [DEVICE]
    ] * ROUNDS
    assert world.reasons == []


def test_who_leaves_after_a_run_leaves_and_the_run_waits_for_it(world):
    """It cannot know better: docs/security.md says so."""
    Forger(world.broker, world.run.enrolment.run, MOMENTS["ready"], times=1)
    world.begin(leave_after_run=True)
    assert world.server.serve() is None
    assert world.reasons == ["the run is finished"]
    assert world.run.controller.finished is None
