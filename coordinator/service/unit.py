"""The unit of the coordinator's service."""

from fleetune.protocols.systemd.install import Service

SERVICE = Service(
    program="edge-coordinator",
    name="coordinator",
    user="fleetune-coordinator",
    templates="fleetune.coordinator.service",
)
