"""The unit of the agent's service."""

from dataclasses import replace
from pathlib import Path

from fleetune.edge_agent.joining.joined_fleet import joined_fleets
from fleetune.protocols.systemd.install import Service

_DATA = {"FLEETUNE_SOURCE": "--data"}
SERVICE = Service(
    program="edge-agent",
    name="agent",
    user="fleetune",
    templates="fleetune.edge_agent.service",
    needed={"FLEETUNE_FLEET": "--fleet", "FLEETUNE_BROKER": "--broker", **_DATA},
)


def service_of_joined(into: Path) -> Service | None:
    """Return the service of a device that has joined a fleet, which needs no broker; None if it has not.

    Args:
        into: root of the device's file system.

    Raises:
        StoreError: what was stored at joining cannot be read.
    """
    fleets = joined_fleets(into / SERVICE.state_folder)
    if not fleets:
        return None
    choice = {"FLEETUNE_FLEET": "--fleet"} if len(fleets) > 1 else {}
    return replace(SERVICE, needed={**choice, **_DATA})
