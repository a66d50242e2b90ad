"""edge-agent: the program on a device."""

import logging
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetune.edge_agent import personal_cli, versions_cli, wipe_cli
from fleetune.edge_agent.logs import set_up_logging
from fleetune.edge_agent.run_options import (
    Authority,
    Certificate,
    CertificateKey,
    DeviceName,
    Root,
    RunOptions,
    StateFolder,
    Threads,
    Trainer,
    takes_run_options,
)
from fleetune.edge_agent.service.cli import app as service
from fleetune.edge_agent.state.defaults import HOST, STATE
from fleetune.edge_agent.stream import cli as stream_cli
from fleetune.protocols.command_group import Commands
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.one_line import one_line_errors
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
        bool, typer.Option("--version", help="print it and stop", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    set_up_logging()


@app.command()
@takes_run_options()
def run(options: dict[str, Any]) -> None:
    """Join a fleet and stay with it, through restarts and lost links."""
    with one_line_errors("edge-agent"):
        from fleetune.edge_agent.agent import Stop
        from fleetune.edge_agent.starting import ready_agent

        agent = ready_agent(RunOptions(**options))
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_number, lambda *_: agent.events.put(Stop("stopped by a signal")))
        log.info("left: %s", agent.run())


@app.command()
def profile(
    broker: Annotated[
        str | None, typer.Option(envvar="FLEETUNE_BROKER", help="measure the link to it; see run")
    ] = None,
    fleet: Annotated[str | None, typer.Option(help="name of the fleet, needed with --broker")] = None,
    device: DeviceName = HOST,
    state: StateFolder = STATE,
    model: Annotated[
        str | None, typer.Option(help="to train, by name; else that of the last run joined, else lenet5")
    ] = None,
    trainer: Trainer = "auto",
    threads: Threads = 1,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
    save: Annotated[
        Path | None, typer.Option(help="write a firmware profile of this board, for run --board FILE")
    ] = None,
    ca: Authority = None,
    cert: Certificate = None,
    key: CertificateKey = None,
    root: Root = Path("/"),
) -> None:
    """Say what this board can do, measured here and now; what cannot be read is unknown, with the reason."""
    import rich

    from fleetune.edge_agent.probes import save_profile, show
    from fleetune.edge_agent.probes import workload as workloads
    from fleetune.edge_agent.probes.board_measurement import measure_board
    from fleetune.edge_agent.probes.link_speed import measure_link
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.protocols.wire import topics
    from fleetune.protocols.wire.transport.mqtt import parse_broker

    with one_line_errors("edge-agent"):
        topics.check_name(device, "device")
        if save is not None:
            save_profile.check_target(save)
        store, link = None, None
        if fleet is not None:
            store = AgentStore(state / topics.check_name(fleet, "fleet") / device)
        if broker is not None and fleet is not None:
            link = partial(measure_link, parse_broker(broker, ca, cert, key), fleet, device)
        workload = partial(workloads.choose_workload, model, store, threads, trainer)
        if model is not None:
            workload()  # a wrong name is a mistake; no trainer otherwise only leaves a figure unknown
        found = measure_board(root, workload=workload, link=link)
        if as_json:
            print(show.as_json(found).decode())
        else:
            rich.print(show.as_table(found))
        if save is not None:
            save_profile.save(found, save)
            log.info("saved: edge-agent run --board %s", save if "/" in str(save) else f"./{save}")


@app.command()
def explain(
    fleet: Annotated[str, typer.Option(help="name of the fleet")],
    device: DeviceName = HOST,
    state: StateFolder = STATE,
) -> None:
    """Show what each ratio would take of this device, against its limits, and why it runs at its own."""
    from rich.console import Console

    from fleetune.edge_agent.budget.board_meter import BoardMeter
    from fleetune.edge_agent.budget.explain import explanation
    from fleetune.edge_agent.budget.ratio_controller import read_ratio_controller
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.protocols.errors import StoreError

    with one_line_errors("edge-agent"):
        store = AgentStore(state / fleet / device)
        known = (read_ratio_controller(store.ratio_controller(run).read()) for run in store.runs())
        ratio_controller = next((one for one in known if one is not None), None)
        if ratio_controller is None:
            raise StoreError(f"{store.folder}: this device has joined no run yet; see edge-agent run")
        Console().print(explanation(ratio_controller, BoardMeter().conditions()))


@app.command()
def boards(
    board: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|FILE]", help="show every figure of this one, with its source"),
    ] = None,
) -> None:
    """List the boards with a profile, or check and show one; a FILE of your own ends in .toml."""
    import rich

    from fleetune import firmware_profiles
    from fleetune.edge_agent.probes.board_profile import board_named
    from fleetune.edge_agent.probes.board_table import all_boards, one_board

    with one_line_errors("edge-agent"):
        if board is None:
            rich.print(all_boards([firmware_profiles.load(name) for name in firmware_profiles.names()]))
        else:
            print(one_board(board_named(board)))


@app.command()
@takes_run_options(but=("leave_after_run",), required=False)
def doctor(
    options: dict[str, Any],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="for scripts")] = False,
) -> None:
    """Check all that an agent needs before it joins: the options of run, whose own line it takes too."""
    from msgspec.structs import fields
    from rich.console import Console

    from fleetune.edge_agent.budget.owner_policy import Policy
    from fleetune.edge_agent.doctor.diagnosis import AgentUnderDiagnosis, examine
    from fleetune.edge_agent.doctor.show import as_json as encoded
    from fleetune.edge_agent.doctor.show import is_well, show
    from fleetune.protocols.wire.transport.mqtt import parse_broker

    broker, problem = None, None
    try:
        if options["broker"] is not None:
            broker = parse_broker(options["broker"], options["ca"], options["cert"], options["key"])
    except FleetuneError as found:
        problem = found
    agent = AgentUnderDiagnosis(
        **{name: options[name] for name in ("device", "fleet", "data", "state", "board", "policy")},
        **{name: options[name] for name in ("test_fraction", "trainer", "train_on", "root")},
        broker=broker,
        limits={one.name: options[one.name] for one in fields(Policy)},
        problem=problem,
    )
    if as_json:
        seen = list(examine(agent))
        print(encoded(seen).decode())
    else:
        seen = show(examine(agent), Console())
    if not is_well(seen):
        raise typer.Exit(1)


app.command()(wipe_cli.wipe)
app.command()(personal_cli.export)
app.command()(personal_cli.predict)
app.command()(stream_cli.add)
app.command()(stream_cli.samples)
for _command in (versions_cli.models, versions_cli.rollback, versions_cli.pin, versions_cli.unpin):
    app.command()(_command)


if __name__ == "__main__":
    app()
