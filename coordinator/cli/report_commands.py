"""edge-coordinator report, devices, explain and status: what a run did and does."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fleetune.coordinator.cli.options import RunFolder, RunsFolder
from fleetune.protocols.one_line import one_line_errors


def report(folder: RunFolder) -> None:
    """Write a run's report in its present state and show its tables, also while the run goes on."""
    from fleetune.coordinator.run.stored_run import look_at
    from fleetune.coordinator.serving.console_output import report_run
    from fleetune.coordinator.store.folder_lock import is_claimed

    with one_line_errors("edge-coordinator"), look_at(folder) as run:
        report_run(run, live=is_claimed(folder))


def devices(
    run_or_fleet: Annotated[
        str | None, typer.Argument(help="name of a fleet, or a run's folder; default: the only fleet")
    ] = None,
    runs: RunsFolder = Path("runs"),
    run: Annotated[
        bool, typer.Option("--run", help="show also board, ratio and why, conditions, last answer")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False,
) -> None:
    """List a fleet's devices: pending, accepted and revoked ones, last seen, version, end of certificate."""
    import msgspec

    from fleetune.coordinator.queries.fleet_devices import fleet_devices
    from fleetune.coordinator.serving.console_output import print_fleet

    with one_line_errors("edge-coordinator"):
        found = fleet_devices(run_or_fleet, runs)
        if as_json:
            print(msgspec.json.encode(found.devices).decode())
        else:
            print_fleet(found, with_run=run)


def explain(folder: RunFolder) -> None:
    """Show the ratios of a run with their costs, and why each device works at its ratio."""
    from rich.console import Console

    from fleetune.coordinator.reports.proposals.explanation import explanation
    from fleetune.coordinator.run.stored_run import look_at

    with one_line_errors("edge-coordinator"), look_at(folder) as run:
        controller = run.controller
        Console().print(explanation(run.settings, controller.engine_state, controller.records()))


def status(
    folder: RunFolder,
    follow: Annotated[bool, typer.Option(help="keep showing the state until the run ends or Ctrl-C")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the state of a run as JSON, for scripts")
    ] = False,
) -> None:
    """Show the state of a run, also while it goes on: round, replies, missing devices and reasons.

    For the folder of a service, show the state of all its runs.
    """
    import msgspec

    from fleetune.coordinator.queries import queries
    from fleetune.coordinator.reports import status as run_status
    from fleetune.coordinator.service.service import is_service

    with one_line_errors("edge-coordinator"):
        if as_json:
            print(msgspec.json.encode(queries.status(folder)).decode())
            return
        if is_service(folder) and not follow:
            from fleetune.coordinator.service.status_table import print_service_status

            print_service_status(folder)
            return
        if not follow:
            run_status.show_status(folder)
            return
        with suppress(KeyboardInterrupt):
            run_status.follow(folder)
