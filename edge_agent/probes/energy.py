"""Measures joules over an interval, from power sensors or from energy counters (RAPL)."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from fleetune.edge_agent.probes.files_and_commands import (
    ROOT,
    Run,
    matches,
    read_number,
    read_text,
    run_command,
)
from fleetune.edge_agent.probes.power_draw import watt_sensors
from fleetune.edge_agent.probes.power_supply import MOST_WATTS

Covers = Literal["board", "processor"]
_WRAPS = 2.0**63
_FILES_EVERY_S, _COMMANDS_EVERY_S, _COUNTERS_EVERY_S = 1.0, 10.0, 30.0
_PATIENCE = 5  # most consecutive readings that may fail before the sum is unknown


class EnergyAccumulator(Protocol):
    """Sums the joules of one sensor."""

    def take(self, now: float) -> None:
        """Read the sensor at `now` seconds."""
        ...

    @property
    def joules(self) -> float | None: ...


class Integral:
    """Sums power draw over time, by trapezoids between readings.

    Args:
        watts: reads the sensor.
        longest_gap_s: longest seconds between two readings. After a longer gap the sum is unknown.
    """

    def __init__(self, watts: Callable[[], float | None], longest_gap_s: float) -> None:
        self._watts, self._longest_gap_s = watts, longest_gap_s
        self._last: tuple[float, float] | None = None
        self._began_at: float | None = None
        self._ended_at = 0.0
        self._joules = 0.0
        self._broken = False

    def take(self, now: float) -> None:
        self._began_at, self._ended_at = self._began_at if self._began_at is not None else now, now
        watts = self._watts()
        if watts is None:
            return
        since, before = self._last or (self._began_at, watts)
        self._broken |= now - since > self._longest_gap_s
        self._joules += (now - since) * (watts + before) / 2
        self._last = now, watts

    @property
    def joules(self) -> float | None:
        """The sum so far, in joules; None if unknown.

        If the last reading failed, the previous reading is used for the time since, for at most the longest
        gap.
        """
        if self._last is None:
            return None
        at, watts = self._last
        if self._broken or self._ended_at - at > self._longest_gap_s:
            return None
        return self._joules + (self._ended_at - at) * watts


class Counters:
    """Sums counters in microjoules, each of which wraps to 0 at its own maximum.

    Args:
        counters: the files, each with its maximum.
    """

    def __init__(self, counters: Mapping[Path, float]) -> None:
        self._counters = counters
        self._last: dict[Path, float] | None = None
        self._at = 0.0
        self._microjoules = 0.0
        self._broken = False

    def take(self, now: float) -> None:
        read = {path: read_number(path, 0, _WRAPS) for path in self._counters}
        values = {path: value for path, value in read.items() if value is not None}
        if len(values) < len(read):
            self._broken = True
        elif self._last is not None:
            grown = sum((values[path] - self._last[path]) % (self._counters[path] + 1) for path in values)
            # a suspend has reset the counter
            self._broken |= grown / 1e6 > MOST_WATTS * max(1.0, now - self._at)
            self._microjoules += grown
        self._last, self._at = values, now

    @property
    def joules(self) -> float | None:
        return None if self._broken or self._last is None else self._microjoules / 1e6


def rapl_counters(root: Path = ROOT) -> tuple[dict[Path, float], Covers]:
    """Return the RAPL files to sum, each with its maximum, and what they cover.

    `psys` covers the whole platform. Without it, the processor packages and their memory are summed. Since
    Linux 5.10 (CVE-2020-8694) only root may read these files; other users get an empty dict.
    """
    packages, platform = {}, {}
    for name in matches(root, "sys/class/powercap/intel-rapl:*/name"):
        energy, kind = name.with_name("energy_uj"), read_text(name) or ""
        wraps_at = read_number(name.with_name("max_energy_range_uj"), 1, _WRAPS)
        if wraps_at is None or read_number(energy, 0, _WRAPS) is None:
            continue
        if kind == "psys":
            platform[energy] = wraps_at
        elif kind.startswith("package") or kind == "dram":
            packages[energy] = wraps_at
    return (platform, "board") if platform else (packages, "processor")


class EnergyMeter:
    """Measures the joules between `start` and `stop`, for one interval after another.

    A thread reads the sensor: files every second, commands every ten seconds, counters every half minute.

    Args:
        root, run: see `edge_agent.probes`.
        clock: monotonic seconds.

    Attributes:
        sensor: name of the sensor, as in `firmware_profiles`; None if there is none.
        covers: the whole board or only the processor; None if there is no sensor.
        seconds: duration of the last interval.
    """

    def __init__(
        self, root: Path = ROOT, run: Run = run_command, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._root, self._run, self._clock = root, run, clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._tally: EnergyAccumulator | None = None
        self._began_at = 0.0
        self.sensor: str | None = None
        self.covers: Covers | None = None
        self.seconds = 0.0

    def start(self) -> None:
        """Start an interval with the first sensor that answers. An unfinished interval is discarded."""
        self.stop()
        self.sensor = self.covers = None
        found = self._find()
        if found is None:
            return
        self._tally, self.sensor, self.covers, every_s = found
        self._began_at = self._clock()
        self._tally.take(self._began_at)
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(self._tally, every_s, self._stopping), name="energy", daemon=True
        )
        self._thread.start()

    def stop(self) -> float | None:
        """End the interval and return its joules; None if there is no sensor, or it stopped answering.

        This waits for a reading in progress; a command on a phone may take a second.
        """
        tally, thread, self._tally, self._thread = self._tally, self._thread, None, None
        if tally is None or thread is None:
            return None
        self._stopping.set()
        thread.join()
        now = self._clock()
        tally.take(now)
        self.seconds = now - self._began_at
        return tally.joules

    def _watch(self, tally: EnergyAccumulator, every_s: float, stopping: threading.Event) -> None:
        while not stopping.wait(every_s):
            tally.take(self._clock())

    def _find(self) -> tuple[EnergyAccumulator, str, Covers, float] | None:
        for sensor in watt_sensors(self._root, self._run):
            every_s = _COMMANDS_EVERY_S if sensor.by_command else _FILES_EVERY_S
            if sensor.read() is not None:
                return Integral(sensor.read, _PATIENCE * every_s), sensor.name, "board", every_s
        counters, covers = rapl_counters(self._root)
        return (Counters(counters), "rapl", covers, _COUNTERS_EVERY_S) if counters else None
