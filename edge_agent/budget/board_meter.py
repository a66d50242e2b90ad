"""The board's sensors while the agent works: its conditions, and the memory and energy that a round takes."""

from pathlib import Path

from fleetune.edge_agent.probes.conditions import BoardSensors
from fleetune.edge_agent.probes.energy import EnergyMeter
from fleetune.edge_agent.probes.memory import PeakMemory
from fleetune.protocols.conditions import Conditions

ROOT = Path("/")


class BoardMeter:
    """Reads the sensors of one board. What the board has no sensor for stays None.

    Args:
        root: of the file system; a tree of made-up files in tests.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._sensors = BoardSensors(root)
        self._memory = PeakMemory(root)
        self._energy = EnergyMeter(root)

    def conditions(self) -> Conditions:
        """Read how the board is just now."""
        return self._sensors.read()

    def start(self) -> None:
        """Begin to measure memory and energy."""
        self._memory.reset()
        self._energy.start()

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that this process took since `start`."""
        return self._memory.read()

    def stop(self) -> float | None:
        """Stop, and return the joules of the whole board since `start`; None: no sensor counts them."""
        joules = self._energy.stop()
        return joules if self._energy.covers == "board" else None
