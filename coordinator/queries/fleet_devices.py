"""The devices of a fleet: what its registry says about each, and what its run knows."""

import time
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from fleetune.coordinator.fleet.authority import Authority
from fleetune.coordinator.fleet.fleet_folder import FleetFolder
from fleetune.coordinator.fleet.registry import RegisteredDevice, Registry
from fleetune.coordinator.fleet.rotation import devices_of_old
from fleetune.coordinator.queries import queries
from fleetune.coordinator.queries.run_status import DeviceStatus, at_rest
from fleetune.coordinator.run.fleets import fleets_in
from fleetune.coordinator.run.stored_run import fleet_of, stored_run
from fleetune.coordinator.store.folder_lock import is_claimed
from fleetune.coordinator.store.run_folder import STATE
from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import suggestion


class FleetDevices(Struct, frozen=True):
    """The devices of a fleet at one moment.

    Attributes:
        fleet: name of the fleet.
        run: folder of the run that is served, or was last; None if the fleet has no run.
        running: True if a coordinator serves that run.
        devices: all registered devices, and those that contacted the run, ascending by id.
    """

    fleet: str
    run: str | None
    running: bool
    devices: tuple[DeviceStatus, ...]


def fleet_devices(asked: str | None, runs: Path) -> FleetDevices:
    """Return the devices of a fleet, also while no coordinator runs.

    Args:
        asked: name of a fleet, or the folder of one of its runs; None if there is only one fleet.
        runs: folder of the runs.

    Raises:
        SettingError: there is no such fleet, or several.
        StoreError: registry or store is damaged.
    """
    fleet, run, runs = _found(asked, runs)
    known = {} if run is None else {one.device: one for one in queries.devices(run)}
    running = run is not None and is_claimed(run)
    files, now = FleetFolder.of(fleet, runs), time.time()
    if files.registry.exists():
        with Registry.open(files.registry) as registry:
            old = _of_old_authority(files, registry, now)
            for one in registry.devices():
                found = _registered(known.get(one.id), one, now, running=running)
                known[one.id] = replace(found, old_authority=one.id in old)
    devices = tuple(known[device] for device in sorted(known))
    return FleetDevices(fleet, None if run is None else str(run), running, devices)


def _of_old_authority(files: FleetFolder, registry: Registry, now: float) -> set[str]:
    """Return the devices that still need the authority that is being replaced."""
    authority = Authority(files)
    if not files.authority.exists() or len(authority.fingerprints) == 1:
        return set()
    return {one.id for one in devices_of_old(authority, registry, now)}


def _registered(
    in_run: DeviceStatus | None, one: RegisteredDevice, now: float, *, running: bool
) -> DeviceStatus:
    """Return what run and registry know of a device; the registry's name wins."""
    found = in_run or DeviceStatus(one.id, "away")
    if in_run is None or one.state == "revoked":
        found = at_rest(found, connected=False if running else None)
    seen = [at for at in (found.last_seen, one.last_seen) if at is not None]
    return replace(
        found,
        name=one.name,
        known_by=one.kind,
        agent=found.agent or one.agent,
        state="ended" if one.state == "accepted" and one.shut_out(now) else one.state,
        tags=one.tags,
        joined_at=one.joined_at,
        last_seen=max(seen, default=None),
        certificate_ends_at=one.ends_at,
    )


def _found(asked: str | None, runs: Path) -> tuple[str, Path | None, Path]:
    """Return the fleet, its run, and the folder of runs."""
    if asked is not None and (Path(asked) / STATE).exists():
        with stored_run(Path(asked)) as run:
            return fleet_of(run.store, run.settings), Path(asked), Path(asked).absolute().parent
    fleets = fleets_in(runs)
    by_run = {folder.name: fleet for fleet, folders in fleets.items() for folder in folders}
    if asked is None and len(fleets) == 1:
        asked = next(iter(fleets))
    elif asked is None:
        advice = f"name one of them: {', '.join(sorted(fleets))}" if fleets else "name another with --runs"
        raise SettingError(f"{runs} has {len(fleets) or 'no'} fleets; {advice}")
    if asked not in fleets and asked not in by_run:
        advice = suggestion(asked, sorted(fleets)) if fleets else f"{runs} has no fleet"
        raise SettingError(f"{asked} is no fleet in {runs}, and holds no run; {advice}")
    fleet = asked if asked in fleets else by_run[asked]
    folders = sorted(fleets[fleet], key=lambda folder: (is_claimed(folder), (folder / STATE).stat().st_mtime))
    return fleet, folders[-1] if folders else None, runs
