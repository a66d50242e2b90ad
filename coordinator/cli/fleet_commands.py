"""edge-coordinator invite, invites, approve, revoke, rename and rotate-authority: who belongs to a fleet."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetune.coordinator.cli.options import RunsFolder
from fleetune.protocols.one_line import one_line_errors

if TYPE_CHECKING:
    from fleetune.coordinator.fleet.authority import Authority
    from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry, StoredInvitation
    from fleetune.protocols.wire.join_exchange import JoinLine

FleetArgument = Annotated[
    str | None, typer.Argument(help="name of a fleet, or a run's folder; default: the only fleet")
]
FleetOption = Annotated[str | None, typer.Option("--fleet", help="name of the fleet; default: the only one")]
Device = Annotated[str, typer.Argument(help="id of a device, or a name that only one device has")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON, for scripts")]
RUNS = Path("runs")


def invite(
    fleet: FleetArgument = None,
    devices: Annotated[int, typer.Option(min=1, max=100_000, help="number of devices that may join")] = 1,
    expires: Annotated[str, typer.Option(help="time until it ends, e.g. 10m, 24h or 7d")] = "10m",
    tag: Annotated[
        list[str], typer.Option(help="tag of the devices that join with it; may be repeated")
    ] = [],  # noqa: B006 - typer's way of saying it
    approve: Annotated[bool, typer.Option("--approve", help="each device waits for `approve`")] = False,
    host: Annotated[
        str | None, typer.Option(help="name or address at which devices reach this machine")
    ] = None,
    qr: Annotated[
        bool | None, typer.Option("--qr/--no-qr", help="print a QR code; default: only on a terminal")
    ] = None,
    as_json: AsJson = False,
    runs: RunsFolder = RUNS,
) -> None:
    """Print a line with which devices join a fleet: on the device, run edge-agent join LINE."""
    import msgspec
    from msgspec.structs import asdict

    from fleetune.coordinator.fleet import invitations
    from fleetune.coordinator.fleet.fleet_address import FleetAddress
    from fleetune.protocols.wire.join_exchange import JoinLine

    with _opened(fleet, runs) as (registry, authority):
        address = FleetAddress.read(authority.folder)
        where, name = _checked_host(host or address.hosts[0]), authority.folder.fleet
        made, code = invitations.invite(
            registry,
            time.time(),
            devices=devices,
            expires_s=_seconds(expires),
            tags=tuple(tag),
            approve=approve,
        )
        line = JoinLine(where, address.join_port, name, code, authority.fingerprint)
        if as_json:
            status = invitations.status_of(registry, made, time.time())
            print(msgspec.json.encode({"line": str(line), "fleet": name} | asdict(status)).decode())
        else:
            _print_invitation(made, line, qr=sys.stdout.isatty() if qr is None else qr)
        _warn_unless_served(name, authority.folder.runs)


def _warn_unless_served(fleet: str, runs: Path) -> None:
    """Print a warning if no coordinator serves the fleet, because its join server is then off."""
    from fleetune.coordinator.run.fleets import fleets_in
    from fleetune.coordinator.store.folder_lock import is_claimed

    if not any(map(is_claimed, fleets_in(runs).get(fleet, ()))):
        print(
            f"no coordinator serves fleet {fleet} now: devices can join once edge-coordinator serve runs",
            file=sys.stderr,
        )


def _checked_host(host: str) -> str:
    from fleetune.protocols.errors import SettingError
    from fleetune.protocols.wire.join_exchange import CODE_LENGTH, FINGERPRINT_LENGTH, JoinLine

    try:
        JoinLine.parse(str(JoinLine(host, 1, "fleet", "a" * CODE_LENGTH, "a" * FINGERPRINT_LENGTH)))
    except SettingError:
        raise SettingError(f"--host {host!r} is no name or address; give one such as 192.168.1.5") from None
    return host


def _seconds(span: str) -> float:
    from fleetune.protocols.errors import SettingError
    from fleetune.protocols.settings.schedule import seconds_of_span

    try:
        return seconds_of_span(span, "--expires")
    except ValueError as problem:
        raise SettingError(str(problem)) from None


def _print_invitation(made: "StoredInvitation", line: "JoinLine", *, qr: bool) -> None:
    print(line)
    if qr:
        import segno

        segno.make(str(line), micro=False).terminal(compact=True)
    if sys.stdout.isatty():
        number = "1 device" if made.devices == 1 else f"{made.devices} devices"
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(made.expires_at))
        print(f"for {number}, until {until}; on the device: edge-agent join, which asks for this line")
        print(f"take it back with: edge-coordinator invites --withdraw {made.id}")


def invites(
    fleet: FleetArgument = None,
    withdraw: Annotated[
        str | None, typer.Option(metavar="ID", help="let no more devices join with this invitation")
    ] = None,
    as_json: AsJson = False,
    runs: RunsFolder = RUNS,
) -> None:
    """List a fleet's invitations, or withdraw one. Codes are not shown, because they are not stored."""
    import msgspec
    from rich.console import Console

    from fleetune.coordinator.fleet import invitations
    from fleetune.coordinator.reports.tables import invitation_table

    with _opened(fleet, runs) as (registry, _):
        if withdraw is not None:
            invitations.withdraw(registry, withdraw)
            print(f"withdrawn: {withdraw}; devices that joined with it stay")
            return
        shown = [invitations.status_of(registry, one, time.time()) for one in registry.invitations()]
        if as_json:
            print(msgspec.json.encode(shown).decode())
            return
        Console().print(invitation_table(shown))


def approve(device: Device, fleet: FleetOption = None, runs: RunsFolder = RUNS) -> None:
    """Let a device in that waits for approval, or that was revoked."""

    def approved(registry: "Registry", found: "RegisteredDevice") -> str:
        if found.state == "accepted":
            return f"nothing to do: {found} is accepted already"
        registry.accept(found.id)
        return f"approved: {found}"

    _change(device, fleet, runs, approved)


def revoke(device: Device, fleet: FleetOption = None, runs: RunsFolder = RUNS) -> None:
    """Let a device no longer connect; a running coordinator disconnects it. Undo it with approve.

    Its invitations that are open to more devices are withdrawn.
    """
    from fleetune.coordinator.fleet.invitations import withdrawn_lines

    def revoked(registry: "Registry", found: "RegisteredDevice") -> str:
        return "\n".join([f"revoked: {found}", *withdrawn_lines(registry.revoke(found.id))])

    _change(device, fleet, runs, revoked)


def rename(
    device: Device,
    name: Annotated[str, typer.Argument(help="new name for people; the id stays")],
    fleet: FleetOption = None,
    runs: RunsFolder = RUNS,
) -> None:
    """Give a device another name for people."""

    def renamed(registry: "Registry", found: "RegisteredDevice") -> str:
        registry.rename(found.id, name)
        return f"{found} is now called {name}"

    _change(device, fleet, runs, renamed)


def rotate_authority(
    fleet: FleetArgument = None,
    now: Annotated[
        bool, typer.Option("--now", help="trust only the new one from now on; all devices join again")
    ] = False,
    runs: RunsFolder = RUNS,
) -> None:
    """Replace a fleet's authority. Devices get the new one by themselves while they are connected."""
    from fleetune.coordinator.fleet.rotation import rotate

    with _opened(fleet, runs) as (registry, authority):
        print(rotate(authority, registry, time.time(), at_once=now))


def _change(
    device: str,
    fleet: str | None,
    runs: Path,
    change: "Callable[[Registry, RegisteredDevice], str]",
) -> None:
    """Change a device, and print the line that `change` returns once the change holds."""
    from fleetune.coordinator.fleet.access_files import write_access_files

    with _opened(fleet, runs) as (registry, authority):
        found = registry.find(device)
        said = change(registry, found)
        write_access_files(authority, registry, time.time())
        print(said)


@contextmanager
def _opened(fleet: str | None, runs: Path) -> "Iterator[tuple[Registry, Authority]]":
    """Open the registry and the authority of a fleet; a mistake of the user ends the program."""
    from fleetune.coordinator.fleet.authority import Authority
    from fleetune.coordinator.fleet.fleets import fleet_of
    from fleetune.coordinator.fleet.registry import Registry
    from fleetune.coordinator.store.run_folder import STATE

    with one_line_errors("edge-coordinator"):
        if fleet is not None and (Path(fleet) / STATE).exists():
            fleet, runs = _fleet_of_run(Path(fleet)), Path(fleet).absolute().parent
        folder = fleet_of(fleet, runs)
        with Registry.open(folder.registry) as registry:
            yield registry, Authority.open(folder, time.time())


def _fleet_of_run(folder: Path) -> str:
    from fleetune.coordinator.run.stored_run import fleet_of, stored_run

    with stored_run(folder) as run:
        return fleet_of(run.store, run.settings)
