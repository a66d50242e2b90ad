"""edge-agent service: install, change, check and remove the agent as a systemd service."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.one_line import one_line_errors
from fleetune.protocols.systemd.options import DryRun, Into, Purge

app = typer.Typer(help="Run the agent as a systemd service.", no_args_is_help=True)


@app.command()
def install(
    fleet: Annotated[str | None, typer.Option(help="name of the fleet, as for run")] = None,
    broker: Annotated[
        str | None,
        typer.Option(
            envvar="FLEETUNE_BROKER", help="as for run; better in the variable, because it holds a password"
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="as for run; a path must be absolute")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="the device's id; default: as stored at joining, or the host name"),
    ] = None,
    options: Annotated[
        str | None, typer.Option(help="more options of run, in one: --options '--charging-only --nice 10'")
    ] = None,
    into: Into = Path("/"),
    dry_run: DryRun = False,
) -> None:
    """Create or change the service fleetune-agent, and start it. Options that are not given stay
    unchanged.

    First join a fleet (edge-agent join LINE --state /var/lib/fleetune), or give --fleet and --broker.
    """
    from fleetune.edge_agent.service.unit import SERVICE, service_of_joined
    from fleetune.protocols.systemd import commands

    values = {
        "FLEETUNE_FLEET": fleet,
        "FLEETUNE_DEVICE": device,
        "FLEETUNE_BROKER": broker,
        "FLEETUNE_SOURCE": data,
        "FLEETUNE_OPTIONS": options,
    }
    with one_line_errors("edge-agent"):
        _check(fleet, device, broker, data)
        service = service_of_joined(into) if broker is None else None
        if service is not None:
            values["FLEETUNE_BROKER"] = ""  # of an earlier installation; it may hold a password
        commands.install(service or SERVICE, values, into=into, dry_run=dry_run)


@app.command()
def uninstall(into: Into = Path("/"), purge: Purge = False, dry_run: DryRun = False) -> None:
    """Stop the service and remove it. Its settings and its state folder stay."""
    from fleetune.edge_agent.service.unit import SERVICE
    from fleetune.protocols.systemd import commands

    with one_line_errors("edge-agent"):
        commands.uninstall(SERVICE, into=into, purge=purge, dry_run=dry_run)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False) -> None:
    """`edge-agent doctor` with the service's settings, as the service's user."""
    import shlex
    import subprocess

    from fleetune.edge_agent.service.unit import SERVICE
    from fleetune.protocols.systemd import commands

    state = Path("/") / SERVICE.state_folder
    with one_line_errors("edge-agent"):
        commands.need_root(SERVICE)
        values = SERVICE.settings(Path("/"))
        command = [str(SERVICE.executable()), "doctor", "--state", str(state)]
        command += ["--data", values["FLEETUNE_SOURCE"]]
        command += shlex.split(values.get("FLEETUNE_OPTIONS", "")) + (["--json"] if as_json else [])
        done = subprocess.run(  # noqa: S603 - the owner's own settings
            command,
            env={**os.environ, **values, "HOME": str(state)},
            cwd=state if state.is_dir() else "/",
            check=False,
            **_as_service_user(),
        )
    raise typer.Exit(done.returncode)


def _as_service_user() -> dict[str, Any]:
    """Arguments for `subprocess.run`: the service's user and all its groups.

    Raises:
        StoreError: there is no such user.
    """
    import grp
    import pwd

    from fleetune.edge_agent.service.unit import SERVICE

    try:
        user = pwd.getpwnam(SERVICE.user)
    except KeyError:
        raise StoreError(
            f"there is no user {SERVICE.user}; run edge-agent service install to create it"
        ) from None
    groups = [group.gr_gid for group in grp.getgrall() if user.pw_name in group.gr_mem]
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": groups}


def _check(fleet: str | None, device: str | None, broker: str | None, data: str | None) -> None:
    """Check the options, before anything is written.

    Raises:
        SettingError: one is wrong.
    """
    from fleetune.edge_agent.datasets.formats import FORMATS
    from fleetune.protocols.wire import topics
    from fleetune.protocols.wire.transport.mqtt import parse_broker

    for name, what in ((fleet, "fleet"), (device, "device")):
        if name is not None:
            topics.check_name(name, what)
    if broker is not None:
        parse_broker(broker)
    kind, _, path = (data or "").partition(":")
    if (kind in FORMATS or kind == "watch") and not Path(path).is_absolute():
        raise SettingError(
            f"--data {data}: a service has no current folder; give {kind}:{Path(path).absolute()}"
        )
