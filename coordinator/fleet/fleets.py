"""Finds the fleet that a command is for."""

from pathlib import Path

from fleetune.coordinator.fleet.fleet_folder import FLEETS, FleetFolder
from fleetune.protocols.errors import SettingError
from fleetune.protocols.one_line import suggestion

_OPEN_IT = (
    "open one with edge-coordinator serve --bind 0.0.0.0; if it has just been started, try again in a moment."
    " With a broker of your own, its users and passwords decide who joins. On this machine, an agent needs"
    " no invitation: edge-agent run --broker localhost --fleet NAME --device NAME --data npz:FILE"
)


def fleet_of(name: str | None, runs: Path) -> FleetFolder:
    """Return the folder of a fleet that other machines can reach.

    Args:
        name: the fleet's name; None if the folder of runs has one fleet only.
        runs: folder of the runs.

    Raises:
        SettingError: there is no such fleet, or several.
    """
    known = sorted(path.parent.name for path in (runs / FLEETS).glob("*/address.json"))
    if not known:
        raise SettingError(f"{runs} has no fleet that other machines can reach; {_OPEN_IT}")
    if name is None and len(known) > 1:
        raise SettingError(f"{runs} has several fleets; name one of them: {', '.join(known)}")
    if name is not None and name not in known:
        raise SettingError(
            f"{runs} has no fleet {name!r} that other machines can reach; {suggestion(name, known)}"
        )
    return FleetFolder.of(name or known[0], runs)
