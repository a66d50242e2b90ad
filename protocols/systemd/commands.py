"""The commands `service install` and `service uninstall` of a program, which print each step."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from fleetune.protocols.errors import SettingError, StoreError
from fleetune.protocols.systemd.install import Command, Service, remove, run, systemd_version, write

_HERE = Path("/")


def install(service: Service, values: Mapping[str, str | None], *, into: Path, dry_run: bool) -> None:
    """Write the service's files where they differ, and start it or restart it.

    Args:
        service: the service.
        values: variables of its settings file; None keeps the present value.
        into: root of the file system.
        dry_run: only show what would be done.

    Raises:
        SettingError, StoreError: the service cannot be installed.
    """
    given = {name: value for name, value in values.items() if value is not None}
    version = systemd_version() if into == _HERE else None
    program = _program(service, needed=into == _HERE and not dry_run)
    wanted = service.files(into, program, given, systemd_version=version)
    if dry_run:
        for file in wanted:
            print(f"# /{file.path}, mode {file.mode:04o}\n{_without_secrets(file.content)}")
        _do(service.activation(into, changed=True), dry_run=True)
        return
    _check_place(service, into)
    changed = False
    for file, changes in write(into, wanted):
        changed |= changes
        print(f"{'changed  ' if changes else 'unchanged'} {into / file.path}")
    _do(service.activation(into, changed=changed))


def _program(service: Service, *, needed: bool) -> Path:
    """Return the path of the service's program; unless it is needed here and now, a fault is only printed.

    Raises:
        SettingError: it is needed, and there is none, or the service's user cannot start it.
    """
    try:
        return service.executable()
    except SettingError as problem:
        if needed:
            raise
        print(f"note: the service could not start from here: {problem}", file=sys.stderr)
        return Path(sys.executable).with_name(service.program)


def uninstall(service: Service, *, into: Path, purge: bool, dry_run: bool) -> None:
    """Stop the service and remove its files; its state folder stays.

    Raises:
        SettingError, StoreError: the service cannot be removed.
    """
    paths = [service.unit_file, service.user_file, *([service.settings_file] if purge else [])]
    there = [path for path in paths if (into / path).exists()]
    if service.unit_file in there:
        _check_place(service, into)
        _do(service.removal(into), dry_run=dry_run)
    for path in there if dry_run else remove(into, there):
        print(f"removed   {into / path}")
    if into == _HERE and service.unit_file in there:
        _do([("systemctl", "daemon-reload")], dry_run=dry_run)
    for path in (service.settings_file, service.state_folder):
        if (into / path).exists() and path not in there:
            print(f"kept      {into / path}")


def need_root(service: Service) -> None:
    """Check that this process may change the system.

    Raises:
        SettingError: it may not.
    """
    if os.geteuid() != 0:
        raise SettingError(f"this needs root: sudo {service.program} service ...")


def _check_place(service: Service, into: Path) -> None:
    if not into.is_dir():
        raise SettingError(f"--into {into}: no such folder")
    if into != _HERE:
        return
    need_root(service)
    if not Path("/run/systemd/system").is_dir():
        raise StoreError("systemd does not run here; --into FOLDER prepares another machine's file system")


def _do(commands: Iterable[Command], *, dry_run: bool = False) -> None:
    for command in commands:
        print(f"{'would run' if dry_run else 'run':<9} {' '.join(command)}")
        if not dry_run:
            run(command)


def _without_secrets(content: str) -> str:
    """Return a file's content for display, without users and passwords of URLs."""
    # up to the line's last @, because a password may contain one
    return re.sub(r"://.*@", "://***@", content)
