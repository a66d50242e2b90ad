"""Carry one payload over a slow MQTT link while asking the device for signs of life.

    python -m fleetune.tools.bench.slow_link --megabytes 45 --mbps 2

makes an emulated link (`tools.links.network_namespaces`), runs broker and coordinator's end on one side and
the device's end on the other, and prints what share of the link the payload got, how long a Ping waited for
its Pong meanwhile, and how often the device had to connect.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
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

Way = Literal["up", "down"]
PORT = 1883


class Job(Struct, frozen=True):
    """What to measure: `megabytes` (10^6 bytes) at `mbps` (10^6 bits of TCP payload a second)."""

    megabytes: float
    mbps: float
    way: Way = "up"
    keepalive_s: int = 30
    which: Which = "auto"

    @property
    def payload(self) -> bytes:
        return Key.of("bench", "payload").generator().bytes(round(self.megabytes * 1e6))


class LinkReport(Struct, frozen=True):
    """What one payload over the link showed.

    Attributes:
        seconds: from the first offer to the last acknowledgement.
        exact: it arrived as it was sent, once.
        goodput_share: payload bits over what the link carries in that time.
        control_median_s, control_max_s: from Ping to Pong while it was on its way.
        pings: how many were answered; `unanswered` were under way at the end, or lost.
        losses: the device's disconnections.
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
    """Make the link, carry the payload, remove the link.

    Raises:
        SettingError: no namespaces here.
        TransportError: one end failed; its words are on stderr.
    """
    link = Constant(job.mbps * 1e6, job.mbps * 1e6)
    with Network([link]) as network, tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, "-P", "-m", "fleetune.tools.bench.slow_link", "--folder", folder]
        program += ["--job", msgspec.json.encode(job).decode(), "--side"]
        with subprocess.Popen(
            network.command(network.agents[0], *program, "device"), stdout=subprocess.PIPE
        ) as device:
            try:
                hub = subprocess.run(
                    network.command(network.hub, *program, "hub"), stdout=subprocess.PIPE, check=False
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
    unheard = len(end.losses)  # before the broker was up
    if job.way == "up":
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
        if job.way == "down":
            end.post(TransferKey("task", "bench"), job.payload)
        patience_s = 30 + 10 * 8 * job.megabytes / job.mbps
        end.run(lambda: bool(end.sent if job.way == "down" else end.arrived), patience_s)
        ended_at = time.monotonic()
        end.send(Finish("bench", "done"))
        end.run(lambda: end.finished, timeout_s=10)  # the broker stops with us: not before the device knows
        report = _report(job, end, broker.which, end.first_offer_at or started_at, ended_at)
        end.transport.close()
        return report


def _report(job: Job, end: Endpoint, which: str, started_at: float, ended_at: float) -> LinkReport:
    waits = [wait for asked_at, wait in end.pongs if asked_at >= started_at]
    seconds = ended_at - started_at
    if job.way == "up":
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


app = typer.Typer(add_completion=False)


@app.command(help="Carry one payload over a slow MQTT link; needs root (network namespaces).")
def main(
    megabytes: Annotated[float, typer.Option(help="Payload, in 10^6 bytes.")] = 45.0,
    mbps: Annotated[float, typer.Option(help="What the link carries, 10^6 bits a second.")] = 2.0,
    way: Annotated[str, typer.Option(help="up: from the device; down: to it.")] = "up",
    keepalive_s: Annotated[int, typer.Option(help="MQTT keepalive.")] = 30,
    broker: Annotated[str, typer.Option(help="auto, mosquitto or amqtt.")] = "auto",
    job: Annotated[str, typer.Option(hidden=True)] = "",
    side: Annotated[str, typer.Option(hidden=True)] = "",
    folder: Annotated[Path, typer.Option(hidden=True)] = Path(),
) -> None:
    try:
        if side:
            given = msgspec.json.decode(job, type=Job)
            outcome = _run_hub(given, folder) if side == "hub" else _run_device(given, folder)
            print(msgspec.json.encode(outcome).decode())
            return
        wanted = {
            "megabytes": megabytes,
            "mbps": mbps,
            "way": way,
            "keepalive_s": keepalive_s,
            "which": broker,
        }
        report = measure(msgspec.convert(wanted, Job))
    except (FleetuneError, msgspec.ValidationError) as problem:
        print(problem, file=sys.stderr)
        raise typer.Exit(2) from None
    print(f"{megabytes:g} MB {way} at {mbps:g} Mbit/s, keepalive {keepalive_s} s, {report.broker}:")
    print(f"  {report.seconds:.1f} s, {report.goodput_share:.1%} of the link, exact: {report.exact}")
    print(
        f"  control message: median {report.control_median_s * 1e3:.0f} ms, max "
        f"{report.control_max_s * 1e3:.0f} ms over {report.pings} pings, {report.unanswered} unanswered"
    )
    print(f"  disconnections of the device: {report.losses or 'none'}")


if __name__ == "__main__":
    app()
