"""edge-agent: the program on a device."""

import logging
import queue
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from protocols.errors import FleetuneError

app = typer.Typer(
    help="Train on this device's own data, together with a fleet, and keep a model of its own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

log = logging.getLogger(__name__)

StateFolder = Annotated[Path, typer.Option("--state", help="where personal models are kept")]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A user's mistake is one line on stderr and exit code 2."""
    try:
        yield
    except FleetuneError as problem:
        print(f"edge-agent: {problem}", file=sys.stderr)
        raise typer.Exit(2) from None


@app.callback()
def main() -> None:
    sys.path.insert(0, "")  # a user's package.module:function stands in the current folder
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


@app.command()
def run(
    fleet: Annotated[str, typer.Option(help="name of the fleet (the coordinator's run.name)")],
    broker: Annotated[
        str,
        typer.Option(envvar="FLEETUNE_BROKER", help="host:port or mqtt[s]://user:password@host:port"),
    ],
    data: Annotated[
        str, typer.Option(help="digits, idx:FOLDER, cifar:FOLDER, har:FOLDER, npz:FILE, package.module:function")
    ],
    device: Annotated[str, typer.Option(help="this device's name")] = socket.gethostname().split(".")[0],
    state: StateFolder = Path("agent-state"),
    board: Annotated[str, typer.Option(help="profile of this board, see edge-agent boards")] = "generic",
    ratio: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1, help="share of the model to train and send; the board's usual one if not given"
        ),
    ] = None,
    test_fraction: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="of the data, held out for testing")
    ] = 0.3,
    threads: Annotated[int, typer.Option(min=1, help="processor threads of training")] = 1,
    trust: Annotated[
        list[str], typer.Option(help="package.module of yours that a run may name; may repeat")
    ] = [],  # noqa: B006 - typer's way of saying it
    ca: Annotated[str | None, typer.Option(help="PEM file of the broker's authority (TLS)")] = None,
    cert: Annotated[str | None, typer.Option(help="PEM file of this device's certificate (TLS)")] = None,
    key: Annotated[str | None, typer.Option(help="PEM file of the certificate's key (TLS)")] = None,
    leave_after_run: Annotated[bool, typer.Option(help="stop when a run is finished")] = False,
) -> None:
    """Join a fleet and stay with it, through restarts and lost links."""
    from msgspec.structs import replace

    from edge_agent.participation import DeviceSettings
    from edge_agent.profile import board_named
    from edge_agent.serve import Agent, Stop
    from protocols import topics
    from protocols.transport import Will
    from protocols.transport.mqtt import MqttTransport, parse_broker

    with one_line_errors():
        topics.check_name(fleet, "fleet")
        topics.check_name(device, "device")
        board_named(board)
        where = parse_broker(broker)
        where = replace(where, ca=ca, cert=cert, key=key, tls=where.tls or ca is not None)
        settings = DeviceSettings(
            fleet=fleet,
            device=device,
            data=data,
            state=state / fleet / device,
            board=board,
            ratio=ratio,
            test_fraction=test_fraction,
            threads=threads,
            trusted=tuple(trust),
        )

        def make_transport(farewell: bytes, events: "queue.SimpleQueue[Any]") -> MqttTransport:
            return MqttTransport(
                where,
                f"{fleet}-{device}",
                subscriptions=topics.device_subscriptions(fleet, device),
                events=events,
                will=Will(topics.topic(fleet, device, "state"), farewell),
            )

        agent = Agent(settings, make_transport, leave_after_run=leave_after_run)
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, lambda *_: agent.events.put(Stop("stopped by a signal")))
        log.info("left: %s", agent.run())


@app.command()
def boards() -> None:
    """List the boards with a profile."""
    import firmware_profiles

    for name in firmware_profiles.names():
        board = firmware_profiles.load(name)
        print(f"{name:22} {board.title}; usual ratio {board.ratio:g}")


@app.command()
def wipe(
    state: StateFolder = Path("agent-state"),
    yes: Annotated[bool, typer.Option(help="do not ask")] = False,
) -> None:
    """Remove everything this agent keeps, its personal models too."""
    from edge_agent.store import AgentStore

    if yes or typer.confirm(f"remove {state} with all personal models in it?"):
        AgentStore(state).wipe()


if __name__ == "__main__":
    app()
