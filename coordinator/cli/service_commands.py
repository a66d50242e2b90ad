"""edge-coordinator service: serve a folder of runs, also as a systemd service."""

import logging
import shlex
from pathlib import Path
from typing import Annotated

import typer

from fleetune.coordinator.cli.options import (
    BrokerAuthority,
    BrokerBind,
    BrokerCertificate,
    BrokerKey,
    BrokerPort,
    BrokerUrl,
    sources,
)
from fleetune.protocols.command_group import RunByDefault, UsageError
from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import one_line_errors, without_url
from fleetune.protocols.systemd.options import DryRun, Into, Purge

app = typer.Typer(
    cls=RunByDefault,
    help="Serve all runs of a folder: service FOLDER. With install, under systemd.",
    no_args_is_help=True,
)


@app.command()
def run(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="folder of run.toml files")],
    broker: BrokerUrl = None,
    bind: BrokerBind = "127.0.0.1",
    port: BrokerPort = None,
    ca: BrokerAuthority = None,
    cert: BrokerCertificate = None,
    key: BrokerKey = None,
) -> None:
    """Serve all runs of FOLDER, each in a supervised process. Files may be added and removed at any time.

    `service FOLDER` is short for `service run FOLDER`.
    """
    from fleetune.coordinator.broker.broker_options import default_port, origin_of
    from fleetune.coordinator.service.start import serve_folder

    logging.getLogger("fleetune.coordinator.service").setLevel(logging.INFO)
    with one_line_errors("edge-coordinator"):
        origin, tls = origin_of(sources(context)), {"ca": ca, "cert": cert, "key": key}
        port = default_port(bind) if port is None else port
        serve_folder(folder, broker=broker, bind=bind, port=port, tls=tls, origin=origin)


@app.command()
def install(
    broker: Annotated[
        str | None,
        typer.Option(
            envvar="FLEETUNE_BROKER",
            help="as for run; better in the variable, because it holds a password; '' for embedded brokers",
        ),
    ] = None,
    options: Annotated[
        str | None, typer.Option(help="more options of run, in one: --options '--bind 0.0.0.0'")
    ] = None,
    into: Into = Path("/"),
    dry_run: DryRun = False,
) -> None:
    """Create or change the service fleetune-coordinator, and start it. Its runs are the run.toml files in
    /var/lib/fleetune-coordinator. Options that are not given stay unchanged.
    """
    from fleetune.coordinator.service.unit import SERVICE
    from fleetune.protocols.systemd import commands
    from fleetune.protocols.wire.transport.mqtt import parse_broker

    with one_line_errors("edge-coordinator"):
        if broker:
            parse_broker(broker)
        _check_options(options or "")
        values = {"FLEETUNE_BROKER": broker, "FLEETUNE_OPTIONS": options}
        commands.install(SERVICE, values, into=into, dry_run=dry_run)


@app.command()
def uninstall(into: Into = Path("/"), purge: Purge = False, dry_run: DryRun = False) -> None:
    """Stop the service and remove it. Its settings and its runs stay."""
    from fleetune.coordinator.service.unit import SERVICE
    from fleetune.protocols.systemd import commands

    with one_line_errors("edge-coordinator"):
        commands.uninstall(SERVICE, into=into, purge=purge, dry_run=dry_run)


def _check_options(options: str) -> None:
    """Check the options of `run` before they are written.

    Raises:
        SettingError: one is unknown or wrong.
    """
    command = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    try:
        command.make_context("run", ["FOLDER", *shlex.split(options)])
    except (UsageError, ValueError) as problem:
        said = getattr(problem, "message", problem)
        raise SettingError(f"--options {options!r}: {without_url(str(said))}") from None
