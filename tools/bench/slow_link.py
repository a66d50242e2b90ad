"""One payload over a slow MQTT link, with control messages meanwhile.

Broker and coordinator's end run on one side of an emulated link (`tools.links.network_namespaces`). The
device's end runs on the other. The report has the share of the link that the payload got, the time that a
Ping waited for its Pong, and the device's reconnects.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Literal

import msgspec
from msgspec import Struct

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker, Which
from fleetune.protocols.errors import FleetuneError, PacketForeign, TransportError
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire.inbox import Arrived, Inbox
from fleetune.protocols.wire.incoming_parts import part_folder
from fleetune.protocols.wire.messages import Finish, Left, Message, Ping, Pong, TransferKey
from fleetune.protocols.wire.outbox import Sent
from fleetune.protocols.wire.peer_link import Answered, Item, Packet, PeerLink
from fleetune.protocols.wire.topics import coordinator_subscriptions, device_subscriptions, parse, topic
from fleetune.protocols.wire.transfer import digest_of
from fleetune.protocols.wire.transport import Connected, Disconnected, Event, EventSink, Received, Transport
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport
from fleetune.tools.links.link import Constant
from fleetune.tools.links.network_namespaces import HUB_ADDRESS, Network

Side = Literal["hub", "device"]
Direction = Literal["up", "down"]
FLEET, DEVICE = "bench", "pi"
PING_EVERY_S = 0.25
PORT = 1883


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


class Job(Struct, frozen=True):
    """A transfer of `megabytes` (10^6 bytes) over a link of `mbps` (10^6 bits of TCP payload a second)."""

    megabytes: float
    mbps: float
    direction: Direction = "up"
    keepalive_s: int = 30
    which: Which = "auto"

    @property
    def payload(self) -> bytes:
        return Key.of("bench", "payload").generator().bytes(round(self.megabytes * 1e6))


class LinkReport(Struct, frozen=True):
    """Result of one transfer over the link.

    Attributes:
        seconds: time from the first offer to the last acknowledgement.
        exact: True if the payload arrived unchanged, once.
        goodput_share: payload bits over the bits that the link carries in that time.
        control_median_s, control_max_s: time from Ping to Pong during the transfer.
        pings: number of answered pings.
        unanswered: pings that were in flight at the end, or lost.
        losses: disconnections of the device, with their reasons.
    """

    broker: str
    seconds: float
    exact: bool
    goodput_share: float
    control_median_s: float
    control_max_s: float
    pings: int
    unanswered: int
    losses: list[str] = []


def measure(job: Job) -> LinkReport:
    """Make an emulated link, carry the payload, and remove the link.

    Raises:
        SettingError: this machine has no network namespaces, or the user is not root.
        TransportError: one end failed; its message is on stderr.
    """
    link = Constant(job.mbps * 1e6, job.mbps * 1e6)
    with Network([link]) as network, tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-P", "-m", "fleetune.tools.bench.slow_link"]
        rest = [msgspec.json.encode(job).decode(), folder]
        with subprocess.Popen(
            network.command(network.agents[0], *program, "device", *rest), stdout=subprocess.PIPE
        ) as device:
            try:
                hub = subprocess.run(
                    network.command(network.hub, *program, "hub", *rest), stdout=subprocess.PIPE, check=False
                )
                losses = device.communicate(timeout=10 if hub.returncode == 0 else 0)[0]
            except subprocess.TimeoutExpired:
                losses = b""
            finally:
                device.kill()
    if hub.returncode or not losses:
        raise TransportError(f"the {'coordinator' if hub.returncode else 'device'}'s end failed; see above")
    report = msgspec.json.decode(hub.stdout, type=LinkReport)
    return msgspec.structs.replace(report, losses=msgspec.json.decode(losses, type=list[str]))


def _endpoint(side: Side, host: str, job: Job, folder: Path) -> Endpoint:
    broker = Broker(host=host, port=PORT, keepalive_s=job.keepalive_s)

    def make_transport(events: EventSink) -> Transport:
        return MqttTransport(broker, side, subscriptions=subscriptions(side), events=events)

    endpoint = Endpoint(side, make_transport, folder / side)
    endpoint.transport.connect()
    return endpoint


def _run_device(job: Job, folder: Path) -> list[str]:
    end = _endpoint("device", HUB_ADDRESS, job, folder)
    end.run(lambda: end.pinged)
    unheard = len(end.losses)  # the broker was not up yet
    if job.direction == "up":
        end.post(TransferKey("update", "bench"), job.payload)
    end.run(lambda: end.finished)
    losses = end.losses[unheard:]
    end.transport.close()
    return losses


def _run_hub(job: Job, folder: Path) -> LinkReport:
    bind = "0.0.0.0"  # noqa: S104 - inside a namespace that only the device shares
    with EmbeddedBroker.start(folder / "broker", port=PORT, bind=bind, which=job.which) as broker:
        end = _endpoint("hub", "127.0.0.1", job, folder)
        end.start_pinging()
        end.run(lambda: bool(end.pongs), timeout_s=30)
        started_at = time.monotonic()
        if job.direction == "down":
            end.post(TransferKey("task", "bench"), job.payload)
        patience_s = 30 + 10 * 8 * job.megabytes / job.mbps
        end.run(lambda: bool(end.sent if job.direction == "down" else end.arrived), patience_s)
        ended_at = time.monotonic()
        end.send(Finish("bench", "done"))
        # the broker stops with this process, so wait until the device knows
        end.run(lambda: end.finished, timeout_s=10)
        report = _report(job, end, broker.which, end.first_offer_at or started_at, ended_at)
        end.transport.close()
        return report


def _report(job: Job, end: Endpoint, which: str, started_at: float, ended_at: float) -> LinkReport:
    waits = [wait for asked_at, wait in end.pongs if asked_at >= started_at]
    seconds = ended_at - started_at
    if job.direction == "up":
        exact = end.arrived == [digest_of(job.payload)]
    else:
        exact = [sent.refused for sent in end.sent] == [None]
    return LinkReport(
        broker=which,
        seconds=seconds,
        exact=exact,
        goodput_share=8 * job.megabytes / seconds / job.mbps,
        control_median_s=statistics.median(waits or [seconds]),
        control_max_s=max(waits, default=seconds),
        pings=len(waits),
        unanswered=end.unanswered(started_at),
    )


def text_of(job: Job, report: LinkReport) -> str:
    """Return the report in words, one fact a line."""
    link = f"{job.megabytes:g} MB {job.direction} at {job.mbps:g} Mbit/s, keepalive {job.keepalive_s} s"
    median, longest = 1e3 * report.control_median_s, 1e3 * report.control_max_s
    pings = f"over {report.pings} pings, {report.unanswered} unanswered"
    return (
        f"{link}, {report.broker}:\n"
        f"  {report.seconds:.1f} s, {report.goodput_share:.1%} of the link, exact: {report.exact}\n"
        f"  control message: median {median:.0f} ms, max {longest:.0f} ms {pings}\n"
        f"  disconnections of the device: {report.losses or 'none'}"
    )


def _run_side(side: str, job: str, folder: str) -> None:
    """Run one end inside its namespace and print its result as JSON."""
    given = msgspec.json.decode(job, type=Job)
    outcome = _run_hub(given, Path(folder)) if side == "hub" else _run_device(given, Path(folder))
    print(msgspec.json.encode(outcome).decode())


if __name__ == "__main__":
    try:
        _run_side(*sys.argv[1:])
    except FleetuneError as problem:
        print(problem, file=sys.stderr)
        sys.exit(2)
