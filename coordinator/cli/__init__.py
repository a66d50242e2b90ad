"""edge-coordinator: the program on the edge server. Each group of commands has a file."""

import logging
from typing import Annotated

import typer

from fleetune.coordinator.cli import (
    broker_commands,
    control_commands,
    fleet_commands,
    model_commands,
    report_commands,
    service_commands,
)
from fleetune.coordinator.cli.forget_command import forget
from fleetune.coordinator.cli.serve_command import serve
from fleetune.protocols.command_group import Commands
from fleetune.protocols.systemd.logs import set_up_logging
from fleetune.protocols.version import show_version

app = typer.Typer(
    cls=Commands,
    help="Run a fleet's training at the edge: plan rounds, exchange sparse updates over MQTT, aggregate.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def main(
    verbose: Annotated[bool, typer.Option(help="log what happens to every message")] = False,
    version: Annotated[  # noqa: ARG001 - acted upon by its callback
        bool,
        typer.Option("--version", help="print the version and exit", is_eager=True, callback=show_version),
    ] = False,
) -> None:
    set_up_logging(logging.DEBUG if verbose else logging.WARNING)


# This is the order of the commands in `--help`.
for command in (
    serve,
    control_commands.pause,
    control_commands.resume,
    control_commands.stop,
    control_commands.start,
    forget,
    report_commands.report,
    report_commands.devices,
    report_commands.explain,
    report_commands.status,
    fleet_commands.invite,
    fleet_commands.invites,
    fleet_commands.approve,
    fleet_commands.revoke,
    fleet_commands.rename,
    fleet_commands.rotate_authority,
    broker_commands.broker_config,
    model_commands.weights,
    model_commands.export,
):
    app.command()(command)

app.add_typer(service_commands.app, name="service")
