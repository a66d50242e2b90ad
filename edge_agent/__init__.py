"""The program on a device: it joins runs, trains on the device's own samples, and sends what its board can
give. `Agent` is it as a library.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetune.edge_agent.library.agent import Agent as Agent

__all__ = ["Agent"]


def __getattr__(name: str) -> object:
    """`Agent`, imported when it is first asked for."""
    if name != "Agent":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fleetune.edge_agent.library.agent import Agent

    return Agent
