"""One end of the wire without an application: a `PeerLink`, a transport, and the loop around them.

For benchmarks and tests of the wire alone.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.wire.inbox import Arrived, Inbox
from fleetune.protocols.wire.incoming_parts import part_folder
from fleetune.protocols.wire.messages import Finish, Left, Message, Ping, Pong, TransferKey
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Answered, Item, Packet, PeerLink
from fleetune.protocols.wire.topics import coordinator_subscriptions, device_subscriptions, parse, topic
from fleetune.protocols.wire.transfer import digest_of
from fleetune.protocols.wire.transport import Connected, Disconnected, Event, EventSink, Received, Transport

Side = Literal["hub", "device"]
FLEET, DEVICE = "bench", "pi"
PING_EVERY_S = 0.25


def subscriptions(side: Side) -> list[str]:
    return coordinator_subscriptions(FLEET) if side == "hub" else device_subscriptions(FLEET, DEVICE)


class Endpoint:
    """One end with its transport and its link.

    Attributes:
        transport: transport that the caller's `connect` opened.
        link: link with the other side.
        sent: delivered payloads.
        arrived: digests of the received payloads, in order.
        pongs: (time of the Ping, seconds until its Pong) for each answered Ping.
        pinged: True if a Ping has arrived.
        connections: number of accepted connections to the broker.
        losses: reason of each lost or refused connection.
        finished: True if the other side reported that it is finished, or confirmed that this one is.
    """

    def __init__(self, side: Side, make_transport: Callable[[EventSink], Transport], folder: Path) -> None:
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.transport = make_transport(self._events)
        inbox = Inbox(DEVICE, part_folder(folder), max_bytes=1 << 30)
        self.link = PeerLink(DEVICE, "coordinator" if side == "hub" else "device", inbox)
        self.sent: list[Sent] = []
        self.arrived: list[str] = []
        self.pongs: list[tuple[float, float]] = []
        self.pinged = False
        self.connections = 0
        self.losses: list[str] = []
        self.finished = False
        self.first_offer_at: float | None = None
        self._ping_at = float("inf")
        self._asked: dict[str, float] = {}

    def run(self, until: Callable[[], bool], timeout_s: float = 900.0) -> bool:
        """Serve until `until()` is true; False after `timeout_s`."""
        give_up_at = time.monotonic() + timeout_s
        while not until():
            now = time.monotonic()
            if now >= give_up_at:
                return False
            wake_at = min(self.link.wake_at or give_up_at, self._ping_at, give_up_at)
            try:
                self._handle(self._events.get(timeout=max(wake_at - now, 0)))
            except Empty:
                self._tick(time.monotonic())
        return True

    def post(self, key: TransferKey, payload: bytes) -> None:
        self._pass(self.link.post(key, payload, time.monotonic()))

    def start_pinging(self) -> None:
        self._ping_at = time.monotonic()

    def send(self, message: Message) -> None:
        self._publish(self.link.packet(message))

    def unanswered(self, since: float) -> int:
        """Number of Pings sent after `since` without a Pong."""
        return sum(asked_at >= since for asked_at in self._asked.values())

    def _publish(self, packet: Packet) -> None:
        self.transport.publish(topic(FLEET, DEVICE, packet.channel), packet.data)

    def _tick(self, now: float) -> None:
        self._pass(self.link.tick(now))
        if now >= self._ping_at:
            nonce = f"{now:.6f}"
            self._asked[nonce] = now
            self._ping_at = now + PING_EVERY_S
            self.send(Ping(nonce))

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case Connected():
                self.connections += 1
                self._pass(self.link.reconnected(now))
            case Disconnected(reason):
                self.losses.append(reason)
            case Received(name, data):
                # chunks that were sent before the other side noticed our restart
                with suppress(PacketForeign):
                    self._pass(self.link.hear(parse(name).channel, data, now))
        if now >= self._ping_at or now >= (self.link.wake_at or now + 1):
            self._tick(now)

    def _pass(self, items: list[Item]) -> None:
        for item in items:
            match item:
                case Packet():
                    self._publish(item)
                case Sent():
                    self.sent.append(item)
                case Arrived():
                    self.arrived.append(digest_of(item.payload()))
                    self._publish(self.link.accept(item))
                case Answered():
                    self.first_offer_at = self.first_offer_at or time.monotonic()
                case _:
                    self._hear(item)

    def _hear(self, message: Message) -> None:
        match message:
            case Ping(nonce):
                self.pinged = True
                self.send(Pong(nonce))
            case Pong(nonce) if nonce in self._asked:
                asked_at = self._asked.pop(nonce)
                self.pongs.append((asked_at, time.monotonic() - asked_at))
            case Finish(run):
                self.finished = True
                self.send(Left(run))
            case Left():
                self.finished = True
