"""`edge-sim bench`: benchmarks for a user's own machine.

    edge-sim bench coordinator --devices 100,500,2000 --participants all --rounds 4
    edge-sim bench coordinator --devices 10000 --participants 10 --rounds 6
    edge-sim bench slow-link --megabytes 45 --mbps 2

Further benchmarks are in benchmarks/ of a checkout.
"""

from pathlib import Path
from typing import Annotated, get_args

import typer

from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import one_line_errors

app = typer.Typer(
    help="Measure Fleetune on this machine. Further benchmarks: benchmarks/ of a checkout of the repository.",
    no_args_is_help=True,
)

BrokerName = Annotated[str, typer.Option("--broker", help="broker: auto, mosquitto or amqtt")]
BROKERS = ("auto", "mosquitto", "amqtt")


@app.command()
def coordinator(
    devices: Annotated[
        str, typer.Option(help="number of devices that connect; several numbers are separated by commas")
    ] = ("100,500,2000"),
    participants: Annotated[
        str, typer.Option(help="number of devices that train in a round, or all")
    ] = "all",
    rounds: Annotated[int, typer.Option(min=2, help="number of rounds; the first is not counted")] = 4,
    broker: BrokerName = "auto",
    out: Annotated[Path | None, typer.Option(help="JSON file for the figures")] = None,
) -> None:
    """Measure the load on a real coordinator as its fleet grows; the devices do not train."""
    with one_line_errors("edge-sim"):
        from fleetune.tools.bench.coordinator_load import show_loads

        sizes = [_number(size, "--devices") for size in devices.split(",")]
        limit = None if participants == "all" else _number(participants, "--participants")
        show_loads(sizes, limit, rounds, _known_broker(broker), out)  # type: ignore[arg-type]


@app.command("slow-link")
def slow_link(
    megabytes: Annotated[float, typer.Option(help="size of the payload, 10^6 bytes")] = 45.0,
    mbps: Annotated[float, typer.Option(help="rate of the link, 10^6 bits a second")] = 2.0,
    direction: Annotated[
        str, typer.Option(help="direction: up (from the device) or down (to the device)")
    ] = "up",
    keepalive_s: Annotated[int, typer.Option(help="MQTT keepalive, seconds")] = 30,
    broker: BrokerName = "auto",
) -> None:
    """Carry one payload over a slow MQTT link and time control messages meanwhile; needs root."""
    with one_line_errors("edge-sim"):
        from fleetune.tools.bench.slow_link import Direction, Job, measure, text_of

        if direction not in get_args(Direction):
            raise SettingError(f"--direction {direction!r}: expected up or down")
        job = Job(megabytes, mbps, direction, keepalive_s, _known_broker(broker))  # type: ignore[arg-type]
        print(text_of(job, measure(job)))


def _number(words: str, option: str) -> int:
    if not words.strip().isdigit() or not int(words):
        raise SettingError(f"{option} {words!r}: give a whole number above 0, e.g. 500")
    return int(words)


def _known_broker(name: str) -> str:
    if name not in BROKERS:
        raise SettingError(f"--broker {name!r}: expected {', '.join(BROKERS)}")
    return name
