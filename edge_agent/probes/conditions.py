"""Reads all conditions that matter to an owner's policy: power, temperature, memory, network."""

import time
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from fleetune.edge_agent.probes import metered_network, temperature
from fleetune.edge_agent.probes.files_and_commands import ROOT, CachedCommands, Run, run_command
from fleetune.edge_agent.probes.memory import attainable_bytes
from fleetune.edge_agent.probes.power_draw import read_draw
from fleetune.edge_agent.probes.power_supply import read_supply
from fleetune.protocols.conditions import Conditions


def read_conditions(root: Path = ROOT, run: Run = run_command) -> Conditions:
    """Read the board's present conditions.

    `celsius` is a battery's temperature if no thermal zone can be read, as on a phone.

    Args:
        root: folder that contains `proc` and `sys`.
        run: runs external commands. Use `CachedCommands` for frequent calls.
    """
    supply, draw = read_supply(root, run), read_draw(root, run)
    hottest = temperature.celsius(root)
    return Conditions(
        memory_bytes=attainable_bytes(root),
        power=supply.power,
        battery=supply.charge,
        watts=None if draw is None else draw.watts,
        celsius=supply.celsius if hottest is None else hottest,
        throttled=temperature.throttled(root, run),
        metered=metered_network.metered(root, run),
    )


class BoardSensors:
    """Reads the board's conditions every few seconds.

    Files are read each time, external commands run at most once a minute.

    Args:
        root, run: see `read_conditions`.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        root: Path = ROOT,
        run: Run = run_command,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._run = CachedCommands(run, clock)
        self._throttle_count: int | None = None

    def read(self) -> Conditions:
        """Read the board's present conditions.

        x86 counts how often it was throttled. There `throttled` is True if the count has risen since the last
        call.
        """
        conditions = read_conditions(self._root, self._run)
        before, self._throttle_count = self._throttle_count, temperature.throttle_count(self._root)
        if before is None or self._throttle_count is None:
            return conditions
        return replace(conditions, throttled=bool(conditions.throttled) or self._throttle_count > before)
