"""The unit of the agent's service."""

from fleetune.protocols.systemd.install import Service

SERVICE = Service(
    program="edge-agent",
    name="agent",
    user="fleetune",
    templates="fleetune.edge_agent.service",
    needed={"FLEETUNE_FLEET": "--fleet", "FLEETUNE_BROKER": "--broker", "FLEETUNE_SOURCE": "--data"},
)
