"""edge-coordinator pause, resume, stop, start and service: commands for one run or for many."""

import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from fleetune.coordinator.cli.options import (
    BrokerAuthority,
    BrokerBind,
    BrokerCertificate,
    BrokerKey,
    BrokerUrl,
    RunOrName,
    ServiceFolder,
    sources,
)
from fleetune.protocols.one_line import one_line_errors


def pause(run: RunOrName, service_folder: ServiceFolder = Path()) -> None:
    """Open no new round until `resume`. The open round is finished."""
    _apply("Pause", run, service_folder)


def resume(run: RunOrName, service_folder: ServiceFolder = Path()) -> None:
    """Let a paused run open rounds again."""
    _apply("Resume", run, service_folder)


def stop(run: RunOrName, service_folder: ServiceFolder = Path()) -> None:
    """Stop serving a run, as Ctrl-C does. It continues when it is served again, or after `start`."""
    _apply("Stop", run, service_folder)


def start(run: RunOrName, service_folder: ServiceFolder = Path()) -> None:
    """Let a service start a stopped run again."""
    _apply("Start", run, service_folder)


def _apply(name: Literal["Pause", "Resume", "Stop", "Start"], run: str, service_folder: Path) -> None:
    from fleetune.coordinator.commands import commands
    from fleetune.coordinator.service.service import folder_of

    command: commands.Command = getattr(commands, name)()
    with one_line_errors("edge-coordinator"):
        print(commands.apply(command, folder_of(run, service_folder)))


def service(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="folder of run.toml files")],
    broker: BrokerUrl = None,
    bind: BrokerBind = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="port of the first fleet's embedded broker; 0 takes free ports"),
    ] = 1883,
    ca: BrokerAuthority = None,
    cert: BrokerCertificate = None,
    key: BrokerKey = None,
) -> None:
    """Serve all runs of FOLDER, each in a supervised process. Files may be added and removed at any time."""
    from fleetune.coordinator.broker.broker_options import origin_of
    from fleetune.coordinator.service.start import serve_folder

    logging.getLogger("fleetune.coordinator.service").setLevel(logging.INFO)
    with one_line_errors("edge-coordinator"):
        origin, tls = origin_of(sources(context)), {"ca": ca, "cert": cert, "key": key}
        serve_folder(folder, broker=broker, bind=bind, port=port, tls=tls, origin=origin)
