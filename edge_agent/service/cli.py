"""edge-agent service: install, change, check and remove the agent as a systemd service."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.edge_agent.service.install import Command

app = typer.Typer(help="Run the agent as a systemd service.", no_args_is_help=True)

Into = Annotated[
    Path,
    typer.Option(help="root of another board's file system, such as a mounted image; nothing is started"),
]
DryRun = Annotated[bool, typer.Option(help="only show what would be done")]


@app.command()
def install(
    fleet: Annotated[str | None, typer.Option(help="name of the fleet (the coordinator's run.name)")] = None,
    broker: Annotated[
        str | None,
        typer.Option(
            envvar="FLEETUNE_BROKER", help="as for run; better in the variable, because it holds a password"
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="as for run; a path must be absolute")] = None,
    device: Annotated[
        str | None,
        typer.Option(help="the device's id; default: as stored, or the host name"),
    ] = None,
    options: Annotated[
        str | None, typer.Option(help="more options of run, in one: --options '--charging-only --nice 10'")
    ] = None,
    into: Into = Path("/"),
    dry_run: DryRun = False,
) -> None:
    """Create or change the service fleetune-agent, and start it. Options that are not given stay
    unchanged.
    """
    from fleetune.edge_agent.service.install import activation, files, program, systemd_version, write

    values = {
        "FLEETUNE_FLEET": fleet,
        "FLEETUNE_DEVICE": device,
        "FLEETUNE_BROKER": broker,
        "FLEETUNE_SOURCE": data,
        "FLEETUNE_OPTIONS": options,
    }
    with one_line_errors("edge-agent"):
        _check(fleet, device, broker, data)
        given = {name: value for name, value in values.items() if value is not None}
        version = systemd_version() if into == Path("/") else None
        wanted = files(into, program(), given, systemd_version=version)
        if dry_run:
            for file in wanted:
                print(f"# /{file.path}, mode {file.mode:04o}\n{_without_secrets(file.content)}")
            _do(activation(into, changed=True), dry_run=True)
            return
        _check_place(into)
        changed = False
        for file, changes in write(into, wanted):
            changed |= changes
            print(f"{'changed  ' if changes else 'unchanged'} {into / file.path}")
        _do(activation(into, changed=changed))


@app.command()
def uninstall(
    into: Into = Path("/"),
    purge: Annotated[bool, typer.Option(help="remove its settings too; personal models always stay")] = False,
    dry_run: DryRun = False,
) -> None:
    """Stop the service and remove it. Its settings and its state folder stay."""
    from fleetune.edge_agent.service.install import (
        SETTINGS_FILE,
        STATE_FOLDER,
        UNIT_FILE,
        USER_FILE,
        removal,
        remove,
    )

    paths = [UNIT_FILE, USER_FILE, *([SETTINGS_FILE] if purge else [])]
    there = [path for path in paths if (into / path).exists()]
    with one_line_errors("edge-agent"):
        if UNIT_FILE in there:
            _check_place(into)
            _do(removal(into), dry_run=dry_run)
        for path in there if dry_run else remove(into, there):
            print(f"removed   {into / path}")
        if into == Path("/") and UNIT_FILE in there:
            _do([("systemctl", "daemon-reload")], dry_run=dry_run)
    remaining = [
        path for path in (SETTINGS_FILE, STATE_FOLDER) if (into / path).exists() and path not in there
    ]
    for path in remaining:
        print(f"kept      {into / path}")


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="print JSON, for scripts")] = False) -> None:
    """`edge-agent doctor` with the service's settings, as the service's user."""
    import shlex
    import subprocess

    from fleetune.edge_agent.service.install import STATE_FOLDER, program, settings

    state = Path("/") / STATE_FOLDER
    with one_line_errors("edge-agent"):
        _need_root()
        values = settings(Path("/"))
        command = [str(program()), "doctor", "--state", str(state)]
        command += ["--fleet", values["FLEETUNE_FLEET"], "--data", values["FLEETUNE_SOURCE"]]
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

    try:
        user = pwd.getpwnam("fleetune")
    except KeyError:
        raise StoreError("there is no user fleetune; run edge-agent service install to create it") from None
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


def _check_place(into: Path) -> None:
    """Check that the service can be installed here.

    Raises:
        SettingError, StoreError: it cannot.
    """
    if not into.is_dir():
        raise SettingError(f"--into {into}: no such folder")
    if into != Path("/"):
        return
    _need_root()
    if not Path("/run/systemd/system").is_dir():
        raise StoreError("systemd does not run here; --into FOLDER prepares another board's file system")


def _need_root() -> None:
    if os.geteuid() != 0:
        raise SettingError("this needs root: sudo edge-agent service ...")


def _do(commands: "list[Command]", *, dry_run: bool = False) -> None:
    from fleetune.edge_agent.service.install import run

    for command in commands:
        print(f"{'would run' if dry_run else 'run':<9} {' '.join(command)}")
        if not dry_run:
            run(command)


def _without_secrets(content: str) -> str:
    """Return a file's content for display, without users and passwords of URLs."""
    # up to the line's last @, because a password may contain one
    return re.sub(r"://.*@", "://***@", content)
