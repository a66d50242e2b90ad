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
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from fleetune.coordinator.broker.embedded_broker import EmbeddedBroker, Which
from fleetune.protocols.errors import FleetuneError, TransportError
from fleetune.protocols.randomness import Key
from fleetune.protocols.wire.messages import Finish, TransferKey
from fleetune.protocols.wire.transfer import digest_of
from fleetune.protocols.wire.transport import EventSink, Transport
from fleetune.protocols.wire.transport.mqtt import Broker, MqttTransport
from fleetune.tools.bench.endpoint import Endpoint, Side, subscriptions
from fleetune.tools.links.link import Constant
from fleetune.tools.links.network_namespaces import HUB_ADDRESS, Network

Direction = Literal["up", "down"]
PORT = 1883


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
    """The report in words, one fact a line."""
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
