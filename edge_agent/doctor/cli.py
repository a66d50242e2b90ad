"""edge-agent doctor: checks everything that an agent needs before it joins a fleet."""

import dataclasses
from typing import Annotated, Any

import typer

from fleetune.edge_agent.run_options import takes_run_options
from fleetune.protocols.errors import FleetuneError


@takes_run_options(but=("leave_after_run",), required=False)
def doctor(
    options: dict[str, Any],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False,
) -> None:
    """Check everything that an agent needs before it joins a fleet. Takes the same options as run.

    With --json it prints `{"ok": ..., "results": [{"verdict", "what", "found", "remedy"}, ...]}`.
    """
    from msgspec import json
    from msgspec.structs import fields
    from rich.console import Console

    from fleetune.edge_agent.budget.owner_policy import Policy
    from fleetune.edge_agent.doctor.diagnosis import AgentUnderDiagnosis, examine
    from fleetune.edge_agent.doctor.show import show
    from fleetune.edge_agent.joining.membership import BrokerOptions
    from fleetune.edge_agent.state.defaults import HOST
    from fleetune.edge_agent.state.state_folder import device_folder

    broker, problem, fleet = None, None, options["fleet"]
    try:
        where = BrokerOptions(**{one.name: options[one.name] for one in dataclasses.fields(BrokerOptions)})
        broker, fleet = where.broker_and_fleet()
    except FleetuneError as found:
        problem = found
    device, state_problem = options["device"] or HOST, None
    try:
        if fleet is not None:
            device = device_folder(options["state"], fleet, options["device"], options["name"]).name
    except FleetuneError as found:
        device, state_problem = None, found
    agent = AgentUnderDiagnosis(
        device=device,
        fleet=fleet,
        **{name: options[name] for name in ("data", "state", "board", "policy")},
        **{name: options[name] for name in ("test_fraction", "label_column", "trainer", "train_on", "root")},
        broker=broker,
        limits={one.name: options[one.name] for one in fields(Policy)},
        problem=problem,
        state_problem=state_problem,
    )
    seen = list(examine(agent)) if as_json else show(examine(agent), Console())
    no_failure = all(result.verdict != "fail" for result in seen)
    if as_json:
        print(json.format(json.encode({"ok": no_failure, "results": seen}), indent=2).decode())
    if not no_failure:
        raise typer.Exit(1)
