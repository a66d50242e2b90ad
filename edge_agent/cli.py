"""edge-agent: the program on a device."""

import logging
import signal
from typing import Annotated, Any

import typer

from fleetune.edge_agent import board_cli, join_cli, personal_cli, versions_cli, wipe_cli
from fleetune.edge_agent.doctor import cli as doctor_cli
from fleetune.edge_agent.doctor import try_cli
from fleetune.edge_agent.run_options import RunOptions, takes_run_options
from fleetune.edge_agent.service.cli import app as service
from fleetune.edge_agent.stream import cli as stream_cli
from fleetune.protocols.command_group import Commands
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.systemd.logs import set_up_logging
from fleetune.protocols.version import show_version

app = typer.Typer(
    cls=Commands,
    help="Train on this device's own data, together with a fleet, and keep a model of its own.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

app.add_typer(service, name="service")

log = logging.getLogger(__name__)


@app.callback()
def main(
    version: Annotated[  # noqa: ARG001 - acted upon by its callback
        bool,
        typer.Option("--version", help="print the version and exit", is_eager=True, callback=show_version),
    ] = False,
) -> None:
    set_up_logging(status_line=True)


@app.command()
@takes_run_options()
def run(options: dict[str, Any]) -> None:
    """Join a fleet and stay in it, through restarts and lost links."""
    with one_line_errors("edge-agent"):
        from fleetune.edge_agent.agent import Stop
        from fleetune.edge_agent.starting import ready_agent

        agent = ready_agent(RunOptions(**options))
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, lambda *_: agent.events.put(Stop("stopped by a signal")))
        log.info("left: %s", agent.run())


app.command()(join_cli.join)
for _command in (board_cli.profile, board_cli.explain, board_cli.boards, doctor_cli.doctor, wipe_cli.wipe):
    app.command()(_command)
app.command("try")(try_cli.try_data)
app.command()(personal_cli.export)
app.command()(personal_cli.predict)
app.command()(stream_cli.add)
app.command()(stream_cli.samples)
for _command in (versions_cli.models, versions_cli.rollback, versions_cli.pin, versions_cli.unpin):
    app.command()(_command)


if __name__ == "__main__":
    app()
