"""One side of the wire with nothing behind it: the serve loop that coordinator and agent both have.

For benchmarks and tests of the wire alone.
"""

import time
from collections.abc import Callable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.wire import messages
from fleetune.protocols.wire.incoming_parts import part_folder
from fleetune.protocols.wire.mailbox import Arrived, Inbox, Outbox, Sent
from fleetune.protocols.wire.messages import (
    Ack,
    Finish,
    Left,
    Message,
    Offer,
    Ping,
    Pong,
    Refuse,
    Resume,
    TransferKey,
)
from fleetune.protocols.wire.topics import (
    Channel,
    coordinator_subscriptions,
    device_subscriptions,
    parse,
    topic,
)
from fleetune.protocols.wire.transfer import Chunk, Outgoing, Reply, digest_of
from fleetune.protocols.wire.transport import Connected, Disconnected, Event, EventSink, Received, Transport

Side = Literal["hub", "device"]
FLEET, DEVICE = "bench", "pi"
PING_EVERY_S = 0.25


def subscriptions(side: Side) -> list[str]:
    return coordinator_subscriptions(FLEET) if side == "hub" else device_subscriptions(FLEET, DEVICE)


class Endpoint:
    """One side: its transport, its outbox and its inbox.

    Attributes:
        transport: opened by the caller's `connect`.
        sent: payloads delivered.
        arrived: digests of the payloads taken, as they came.
        pongs: for each answered Ping when it was sent and how long its Pong took, seconds.
        pinged: a Ping came.
        connections: how often the broker took us.
        losses: why not, each time.
        finished: the other side said so, or answered when this one did.
    """

    def __init__(self, side: Side, make_transport: Callable[[EventSink], Transport], folder: Path) -> None:
        self._side = side
        self._events: SimpleQueue[Event] = SimpleQueue()
        self.transport = make_transport(self._events)
        self.outbox = Outbox(DEVICE)
        self.inbox = Inbox(DEVICE, part_folder(folder), max_bytes=1 << 30)
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
        """Serve until `until()`; False when `timeout_s` passed before."""
        give_up_at = time.monotonic() + timeout_s
        while not until():
            now = time.monotonic()
            if now >= give_up_at:
                return False
            wake_at = min(self.outbox.wake_at or give_up_at, self._ping_at, give_up_at)
            try:
                self._handle(self._events.get(timeout=max(wake_at - now, 0)))
            except Empty:
                self._tick(time.monotonic())
        return True

    def post(self, transfer_key: TransferKey, payload: bytes) -> None:
        self._emit(self.outbox.post(transfer_key, payload, time.monotonic()))

    def start_pinging(self) -> None:
        self._ping_at = time.monotonic()

    def send(self, message: Message) -> None:
        self._publish("down" if self._side == "hub" else "up", messages.encode(message))

    def unanswered(self, since: float) -> int:
        """Pings sent after `since` that have no Pong yet."""
        return sum(asked_at >= since for asked_at in self._asked.values())

    def _publish(self, channel: Channel, data: bytes) -> None:
        self.transport.publish(topic(FLEET, DEVICE, channel), data)

    def _tick(self, now: float) -> None:
        self._emit(self.outbox.tick(now))
        if now >= self._ping_at:
            nonce = f"{now:.6f}"
            self._asked[nonce] = now
            self._ping_at = now + PING_EVERY_S
            self.send(Ping(nonce))

    def _emit(self, items: list[Outgoing] | list[Outgoing | Sent] | list[Reply | Arrived]) -> None:
        for item in items:
            match item:
                case Chunk():
                    self._publish("task" if self._side == "hub" else "update", item.encode())
                case Sent():
                    self.sent.append(item)
                case Arrived():
                    self.arrived.append(digest_of(item.payload()))
                    self.inbox.settle(item.offer.transfer)
                case Offer() | Resume() | Ack() | Refuse():
                    self.send(item)

    def _handle(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case Connected():
                self.connections += 1
                self._emit(self.outbox.reconnected(now))
            case Disconnected(reason):
                self.losses.append(reason)
            case Received(name, data) if parse(name).channel in ("update", "task"):
                try:
                    self._emit(self.inbox.handle_chunk(data, now))
                except PacketForeign:  # sent before the other side noticed that we restarted
                    return
            case Received(_, data):
                read = messages.read_from_device if self._side == "hub" else messages.read_to_device
                self._handle_control(read(data), now)
        if now >= self._ping_at or now >= (self.outbox.wake_at or now + 1):
            self._tick(now)

    def _handle_control(self, message: Message, now: float) -> None:
        match message:
            case Offer():
                self.first_offer_at = self.first_offer_at or now
                self._emit(self.inbox.handle_offer(message))
            case Resume() | Ack() | Refuse():
                self._emit(self.outbox.handle(message, now))
            case Ping(nonce):
                self.pinged = True
                self.send(Pong(nonce))
            case Pong(nonce) if nonce in self._asked:
                asked_at = self._asked.pop(nonce)
                self.pongs.append((asked_at, now - asked_at))
            case Finish(run):
                self.finished = True
                self.send(Left(run))
            case Left():
                self.finished = True
