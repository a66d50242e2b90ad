"""Thousands of devices in one process with real sockets and transfers, but fixed replies, to load a
coordinator.

    python -m fleetune.tools.bench.light_devices --port 1883 --fleet bench --first 0 --count 500

Each device is an MQTT client of its own and speaks the agent's protocol through a `PeerLink`. It does
not train: its reply contains the unchanged weights of the task. All devices share one loop and no threads.
"""

import argparse
import selectors
import socket
import struct
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import fleetune.protocols.wire.messages as wire
from fleetune.protocols.method.averaging import Task, Update
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.update import codec
from fleetune.protocols.wire import topics
from fleetune.protocols.wire.capabilities import EVERYTHING
from fleetune.protocols.wire.inbox import Arrived, Inbox
from fleetune.protocols.wire.incoming_parts import PartMemory
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Assignment, Enrolment, Measures, Reply
from fleetune.protocols.wire.peer_link import Item, Packet, PeerLink

MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
NUM_SAMPLES = 10
TICK_EVERY_S = 0.25
CONNECTS_AT_A_TIME = 50
CONNECTED, PUBLISHED, SUBSCRIBED = 2, 3, 9  # types of MQTT 3.1.1 packets


def packet(head: int, body: bytes) -> bytes:
    """Return an MQTT packet: first byte, length in groups of 7 bits, body."""
    length, groups = len(body), bytearray()
    while True:
        length, group = divmod(length, 128)
        groups.append(group | (128 if length else 0))
        if not length:
            return bytes([head]) + bytes(groups) + body


def text(words: str) -> bytes:
    """Return an MQTT string: its length in 2 bytes, then its bytes."""
    data = words.encode()
    return struct.pack(">H", len(data)) + data


class Connection:
    """One client of the broker, at QoS 0 and without keepalive, on a non-blocking socket."""

    def __init__(self, port: int, client: str, subscriptions: Iterable[str]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._subscriptions = list(subscriptions)
        self._read, self._unsent = bytearray(), bytearray()
        self._send(packet(0x10, text("MQTT") + bytes([4, 2, 0, 0]) + text(client)))

    @property
    def blocked(self) -> bool:
        """True if data waits until the socket accepts more."""
        return bool(self._unsent)

    def publish(self, topic: str, data: bytes) -> None:
        self._send(packet(0x30, text(topic) + data))

    def flush(self) -> None:
        """Send waiting data. Raises OSError: the connection is lost."""
        with suppress(BlockingIOError):
            del self._unsent[: self.socket.send(self._unsent)]

    def receive(self) -> list[tuple[int, bytes]]:
        """Receive packets; return their types and bodies. Raises OSError: the connection is lost."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the broker closed a connection; see its log and `ulimit -n`")
        self._read += data
        packets = []
        while (found := self._next()) is not None:
            packets.append(found)
        if any(kind == CONNECTED for kind, _ in packets):
            filters = b"".join(text(one) + b"\x00" for one in self._subscriptions)
            self._send(packet(0x82, b"\x00\x01" + filters))
        return packets

    def _next(self) -> tuple[int, bytes] | None:
        length = shift = 0
        for place in range(1, min(5, len(self._read))):
            group = self._read[place]
            length |= (group & 127) << shift
            shift += 7
            if group < 128:
                end = place + 1 + length
                if len(self._read) < end:
                    return None
                found = self._read[0] >> 4, bytes(self._read[place + 1 : end])
                del self._read[:end]
                return found
        return None

    def _send(self, data: bytes) -> None:
        self._unsent += data
        self.flush()


@dataclass
class Shared:
    """Objects that all devices of a process share, so that each device is cheap."""

    fleet: str
    spec: ModelSpec | None = None
    update: Update | None = None

    def enrolled(self, payload: bytes) -> ModelSpec:
        """Return the run's model, decoded once."""
        if self.spec is None:
            self.spec = codec.decode(payload, Enrolment, None).spec
        return self.spec

    def reply(self, device: str, key: TransferKey, payload: bytes) -> bytes:
        """Return the fixed reply to a task."""
        assert self.spec is not None, "a device enrols before it is asked"
        if self.update is None:
            task: Task = codec.decode(payload, Assignment[Task], self.spec).task
            self.update = Update(task.patch, NUM_SAMPLES)
        update = None if key.final_evaluation else self.update
        measures = Measures(NUM_SAMPLES, NUM_SAMPLES, 0.1, 0.5, 0.5)
        return codec.encode(Reply(device, key.round, key.attempt, False, measures, update), self.spec)


@dataclass
class LightDevice:
    """One device."""

    name: str
    connection: Connection
    shared: Shared
    link: PeerLink = field(init=False)
    finished: bool = False

    def __post_init__(self) -> None:
        inbox = Inbox(self.name, lambda _: PartMemory(), max_bytes=MAX_PAYLOAD_BYTES)
        self.link = PeerLink(self.name, "device", inbox)

    def hear(self, kind: int, body: bytes, now: float) -> None:
        """Handle a packet from the broker."""
        if kind == SUBSCRIBED:
            self._publish(Packet("state", wire.Presence(True, "light", reads=EVERYTHING)))
        if kind != PUBLISHED:
            return
        (length,) = struct.unpack_from(">H", body)
        channel, data = body[2 : 2 + length].rsplit(b"/", 1)[1].decode(), body[2 + length :]
        self._pass(self.link.hear(channel, data, now), now)

    def tick(self, now: float) -> None:
        self._pass(self.link.tick(now), now)

    def _pass(self, items: Iterable[Item], now: float) -> None:
        for item in items:
            match item:
                case Packet():
                    self._publish(item)
                case Arrived(offer):
                    payload = item.payload()
                    # the coordinator expects nothing from a device without an enrolment
                    self._publish(self.link.accept(item))
                    self._take(offer.transfer_key, payload, now)
                case wire.Finish(run):
                    self._tell(wire.Left(run))
                    self.finished = True

    def _take(self, key: TransferKey, payload: bytes, now: float) -> None:
        if key.kind == "enrolment":
            report = DeviceReport(self.name, num_samples=NUM_SAMPLES, round_s=1.0)
            self._tell(wire.Ready(key.run, self.shared.enrolled(payload).hash, report))
        elif key.kind == "task":
            reply = self.shared.reply(self.name, key, payload)
            round_attempt = key.round_attempt
            self._tell(wire.Measured(key.run, *round_attempt, RoundCost(train_s=0.0)))
            self._pass(self.link.post(key.update, reply, now), now)

    def _tell(self, message: wire.Message) -> None:
        self._publish(self.link.packet(message))

    def _publish(self, packet: Packet) -> None:
        topic = topics.topic(self.shared.fleet, self.name, packet.channel)
        self.connection.publish(topic, packet.data)


class Crowd:
    """The loop of one process's devices."""

    def __init__(self, port: int, fleet: str, first: int, count: int) -> None:
        self._port, self._shared = port, Shared(fleet)
        self._coming = [f"light-{number:05}" for number in range(first, first + count)][::-1]
        self._devices: list[LightDevice] = []
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Run until every device knows that the run is finished."""
        tick_at = 0.0
        while self._coming or not all(device.finished for device in self._devices):
            for _ in range(min(CONNECTS_AT_A_TIME, len(self._coming))):
                self._connect(self._coming.pop())
            for key, mask in self._selector.select(TICK_EVERY_S):
                self._serve(key.data, mask)
            if time.monotonic() >= tick_at:
                for device in self._devices:
                    device.tick(time.monotonic())
                tick_at = time.monotonic() + TICK_EVERY_S

    def _connect(self, name: str) -> None:
        subscriptions = topics.device_subscriptions(self._shared.fleet, name)
        device = LightDevice(name, Connection(self._port, name, subscriptions), self._shared)
        self._devices.append(device)
        self._selector.register(device.connection.socket, selectors.EVENT_READ, device)

    def _serve(self, device: LightDevice, mask: int) -> None:
        connection = device.connection
        if mask & selectors.EVENT_WRITE:
            connection.flush()
        if mask & selectors.EVENT_READ:
            for kind, body in connection.receive():
                device.hear(kind, body, time.monotonic())
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.blocked else 0)
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="devices of a load test, see fleetune.tools.bench.coordinator_load"
    )
    for name in ("port", "first", "count"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--fleet", required=True)
    given = parser.parse_args()
    Crowd(given.port, given.fleet, given.first, given.count).run()


if __name__ == "__main__":
    main()
