"""edge-agent profile, explain and boards: what this board can do, and the cost of a round on it."""

import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fleetune.edge_agent.run_options import (
    Authority,
    Certificate,
    CertificateKey,
    DeviceId,
    Fleet,
    Root,
    StateFolder,
    Threads,
    Trainer,
)
from fleetune.edge_agent.state.defaults import STATE
from fleetune.protocols.one_line import one_line_errors

log = logging.getLogger(__name__)


def profile(
    broker: Annotated[
        str | None,
        typer.Option(
            envvar="FLEETUNE_BROKER", help="broker to which the link is measured, as for edge-agent run"
        ),
    ] = None,
    fleet: Fleet = None,
    device: DeviceId = None,
    state: StateFolder = STATE,
    model: Annotated[
        str | None,
        typer.Option(help="name of the model to train; default: that of the last run joined, else lenet5"),
    ] = None,
    trainer: Trainer = "auto",
    threads: Threads = 1,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False,
    save: Annotated[
        Path | None, typer.Option(help="write a firmware profile of this board, for run --board FILE")
    ] = None,
    ca: Authority = None,
    cert: Certificate = None,
    key: CertificateKey = None,
    root: Root = Path("/"),
) -> None:
    """Measure what this board can do. Figures that cannot be read are unknown, with the reason."""
    import rich

    from fleetune.edge_agent.joining.joined_fleet import joined_fleet
    from fleetune.edge_agent.joining.membership import BrokerOptions
    from fleetune.edge_agent.probes import save_profile, show
    from fleetune.edge_agent.probes import workload as workloads
    from fleetune.edge_agent.probes.board_measurement import measure_board
    from fleetune.edge_agent.probes.link_speed import measure_link
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.protocols.wire import topics

    with one_line_errors("edge-agent"):
        if save is not None:
            save_profile.check_target(save)
        if device is not None:
            topics.check_name(device, "device")
        store, link, member = None, None, None
        if (broker is not None and fleet is not None) or joined_fleet(state, fleet) is not None:
            member = BrokerOptions(fleet, broker, device, state, ca, cert, key).membership()
        if fleet is not None or member is not None:
            store = AgentStore.of(state, fleet, device)
        if member is not None and store is not None:
            link = partial(measure_link, member.broker, member.fleet, store.device)
        workload = partial(workloads.choose_workload, model, store, threads, trainer)
        if model is not None:
            workload()  # A wrong name is an error. A missing trainer only leaves the speed unknown.
        found = measure_board(root, workload=workload, link=link)
        if as_json:
            print(show.as_json(found).decode())
        else:
            rich.print(show.as_table(found))
        if save is not None:
            save_profile.save(found, save)
            log.info("saved: edge-agent run --board %s", save if "/" in str(save) else f"./{save}")


def explain(
    fleet: Fleet = None,
    device: DeviceId = None,
    state: StateFolder = STATE,
) -> None:
    """Show the predicted cost of each ratio on this device, its limits, and the reason for the present
    ratio.
    """
    from rich.console import Console

    from fleetune.edge_agent.budget.board_meter import BoardMeter
    from fleetune.edge_agent.budget.explain import explanation
    from fleetune.edge_agent.budget.ratio_controller import read_ratio_controller
    from fleetune.edge_agent.state.agent_store import AgentStore
    from fleetune.protocols.errors import StoreError

    with one_line_errors("edge-agent"):
        store = AgentStore.of(state, fleet, device)
        known = (read_ratio_controller(store.ratio_controller(run).read()) for run in store.runs())
        ratio_controller = next((one for one in known if one is not None), None)
        if ratio_controller is None:
            raise StoreError(
                f"{store.folder}: this device has joined no run yet; start it with edge-agent run"
            )
        Console().print(explanation(ratio_controller, BoardMeter().conditions()))


def boards(
    board: Annotated[
        str | None,
        typer.Argument(metavar="[NAME|FILE]", help="show every figure of this board, with its source"),
    ] = None,
) -> None:
    """List the boards with a profile, or show one. A FILE of your own ends in .toml and is checked."""
    import rich

    from fleetune import firmware_profiles
    from fleetune.edge_agent.probes.board_profile import board_named
    from fleetune.edge_agent.probes.board_table import all_boards, one_board

    with one_line_errors("edge-agent"):
        if board is None:
            rich.print(all_boards([firmware_profiles.load(name) for name in firmware_profiles.names()]))
        else:
            print(one_board(board_named(board)))
