"""A coordinator and an agent in this process, driven packet by packet without broker, threads and clock."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from msgspec import UNSET
from tests.conftest import PullToTarget, tiny_spec

from fleetune.coordinator.run.enrolment import Beginning
from fleetune.coordinator.run.observers import Observers
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.server import Server
from fleetune.edge_agent.agent import Agent
from fleetune.edge_agent.run.device import Device, DeviceSettings
from fleetune.edge_agent.run.session import Session
from fleetune.protocols.method.choice import Budget, DeviceReport
from fleetune.protocols.methods import from_section
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.wire import messages as wire
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.capabilities import EVERYTHING
from fleetune.protocols.wire.inbox import Inbox
from fleetune.protocols.wire.incoming_parts import PartMemory
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.peer_link import PeerLink
from fleetune.protocols.wire.transport import Received
from fleetune.protocols.wire.transport.memory import MemoryBroker

FLEET = "talk"
SPEC = tiny_spec()


def run_settings(method="fedavg", rounds=3, start_with=1, **changes):
    return parse_run(
        {
            "run": {"name": FLEET, "rounds": rounds},
            "model": {"name": "tiny"},
            "method": {"name": method, **changes.pop("method_settings", {})},
            "data": {"validation_fraction": 0.2},
            "round": {"start_with": start_with, **changes},
        }
    )


def enrolment_of(settings, spec=SPEC, **changes):
    weights = Key.of("weights").uniform(spec.size).astype(np.float32) - np.float32(0.5)
    made = Enrolment(
        run=f"{FLEET}-1",
        seed=1,
        spec=spec,
        method=settings.method,
        training=TrainingSection(),
        mean=0.0,
        std=1.0,
        validation_fraction=0.2,
        deadline_s=600.0,
        flops_per_sample=1e3,
        activation_bytes_per_sample=1e3,
        weights=weights,
    )
    return replace(made, **changes)


class Memory:
    """Memory of a session, without files."""

    data: bytes | None = None
    plain = False

    def read(self):
        return self.data

    def write(self, data):
        self.data = data


@dataclass
class Coordinating:
    """A run with its server; the test plays the devices.

    Attributes:
        run: the open run.
        server: the server, whose events are handled here one by one.
        said: published messages in order: topic and bytes.
    """

    run: Run
    server: Server
    said: list[tuple[str, bytes]]

    @classmethod
    def of(cls, folder, settings, spec=SPEC, *, observers=(), **changes):
        """Open a run; `changes`: changed values of the enrolment."""
        run = open_run(
            settings, folder, durable=False, beginning=Beginning(enrolment_of(settings, spec, **changes))
        )
        said: list[tuple[str, bytes]] = []
        broker = MemoryBroker()
        server = Server(
            run,
            FLEET,
            lambda events: broker.client([], events),
            Observers(observers),
            timer=lambda: 0.0,
            clock=lambda: 0.0,
        )
        server._transport.publish = lambda topic, data, **_: said.append((topic, data))
        server.resume()
        return cls(run, server, said)

    @property
    def id(self):
        return self.run.enrolment.run

    def close(self):
        self.run.store.close()

    def hear(self, device, message, channel="up"):
        """Handle a message, or bytes, from a device."""
        data = message if isinstance(message, bytes) else wire.encode(message)
        self.server._handle(Received(topics.topic(FLEET, device, channel), data))

    def greet(self, device, base=UNSET, **report):
        """Let a device connect and report that it is ready.

        `base`: digest of the model that the device has; UNSET: it does not support differences.
        """
        self.hear(device, wire.Presence(True, "x", reads=EVERYTHING), "state")
        for topic, data in self.take(device):
            if data and topic.endswith("/down") and isinstance(offer := wire.read_to_device(data), Offer):
                self.hear(device, Ack(offer.transfer, offer.num_bytes))
        report = DeviceReport(device, **report)
        self.hear(device, wire.Ready(self.id, self.run.enrolment.spec.hash, report, base))

    def take(self, device):
        """Messages to a device since the last call."""
        mine = [one for one in self.said if f"/{device}/" in one[0]]
        self.said[:] = [one for one in self.said if one not in mine]
        return mine

    def task(self, device):
        """Take the payload of the device's task from its sender, and acknowledge it."""
        sender = self.server.parts.sessions[device].link.outbox._queue[0]
        payload = bytes(sender._flight._payload)
        self.take(device)
        self.hear(device, Ack(sender.offer.transfer, sender.offer.num_bytes))
        return payload

    def send(self, device, transfer_key: TransferKey, payload: bytes) -> Any:
        """Transfer a payload correctly; return the outcome."""

        def hear(packet):
            self.hear(device, packet.data, packet.channel)

        def take():
            return [
                wire.read_to_device(data)
                for topic, data in self.take(device)
                if data and topic.endswith("/down")
            ]

        return _transfer(sending_link(device, "device"), transfer_key, payload, hear, take)

    def session(self, device):
        """The session of a device."""
        method = from_section(self.run.enrolment.method, self.run.enrolment.spec)
        trainer = PullToTarget(self.run.enrolment.spec, device)
        return Session(self.run.enrolment, device, method, trainer, Memory())


def answered(session, task, ratio=1.0):
    """A device's reply to a task."""
    return session.reply(task, Budget(ratio))


class AgentTalk:
    """An agent whose coordinator is the test; its jobs run when the test calls `work`.

    Attributes:
        agent: the agent, whose events are handled here one by one.
        said: published messages in order: topic and bytes.
    """

    def __init__(self, folder, device="a", **settings):
        chosen = {"data": "digits", "trainer": "onnx", **settings}
        broker, self.said = MemoryBroker(), []
        self.agent = Agent(
            Device.opened(DeviceSettings(fleet=FLEET, device=device, state=folder, **chosen)),
            lambda _, events: broker.client([], events),
            clock=lambda: 0.0,
        )
        self.agent._connection._transport.publish = lambda topic, data, **_: self.said.append((topic, data))
        self.device = device

    def hear(self, message, channel="down"):
        """Handle a message, or bytes, from the coordinator."""
        data = message if isinstance(message, bytes) else wire.encode(message)
        self.agent._handle(Received(topics.topic(FLEET, self.device, channel), data))

    def send(self, transfer_key: TransferKey, payload: bytes):
        """A payload, honestly transferred; what became of it."""

        def take():
            said, self.said[:] = list(self.said), []
            return [wire.read_from_device(data) for topic, data in said if topic.endswith("/up")]

        def hear(packet):
            self.hear(packet.data, packet.channel)

        return _transfer(sending_link(self.device, "coordinator"), transfer_key, payload, hear, take)

    def close(self):
        self.agent._jobs.close()
        self.agent._device.close()


def sending_link(device, role):
    """A link that only sends and accepts no payload."""
    return PeerLink(device, role, Inbox(device, lambda _: PartMemory(), max_bytes=0))


def _transfer(link, transfer_key, payload, hear, take):
    """Exchange messages until the payload is sent, or the other side does not answer."""
    items: list[Any] = link.post(transfer_key, payload, 0.0)
    while True:
        for item in items:
            if isinstance(item, Sent):
                return item
            hear(item)
        answers = [one for one in take() if isinstance(one, Ack | Resume | Refuse)]
        if not answers:
            return None
        items = [item for one in answers for item in link.handle(one, 0.0)]
