"""Reads the board's sensors while the agent works: its conditions, and a round's memory and energy."""

from pathlib import Path

from fleetune.edge_agent.probes.conditions import BoardSensors
from fleetune.edge_agent.probes.energy import EnergyMeter
from fleetune.edge_agent.probes.memory import PeakMemory
from fleetune.protocols.conditions import Conditions

ROOT = Path("/")


class BoardMeter:
    """Reads the sensors of one board. A figure without a sensor is None.

    Args:
        root: root of the file system. Tests use a tree of synthetic files.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._sensors = BoardSensors(root)
        self._memory = PeakMemory(root)
        self._energy = EnergyMeter(root)

    def conditions(self) -> Conditions:
        """Read the board's present conditions."""
        return self._sensors.read()

    def start(self) -> None:
        """Start to measure memory and energy."""
        self._memory.reset()
        self._energy.start()

    @property
    def peak_bytes(self) -> int | None:
        """Return the peak memory of this process since `start`, in bytes."""
        return self._memory.read()

    def stop(self) -> float | None:
        """Stop, and return the joules of the whole board since `start`; None if no sensor measures them."""
        joules = self._energy.stop()
        return joules if self._energy.covers == "board" else None
