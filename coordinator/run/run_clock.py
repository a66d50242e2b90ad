"""The clock of a run on a real fleet: the time of day when the coordinator starts, steady from then on."""

import time
from collections.abc import Callable
from datetime import UTC
from typing import Self

from fleetune.coordinator.rounds.policies.schedule import Schedule
from fleetune.coordinator.store.device_rows import read_engine
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.settings.schedule import UTC as UTC_NAME
from fleetune.protocols.settings.schedule import ScheduleSection


class RunClock:
    """Seconds since 1970, but unaffected when the time of day is set while the coordinator runs.

    The clock advances while the coordinator is stopped. It never goes back from one process to the next, even
    on a board whose own clock is wrong after a restart. So no round has a negative duration, and deadlines
    keep their length.

    Args:
        latest: latest time that the run has seen; None for a new run.
        wall: the time of day, seconds since 1970.
        steady: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        latest: float | None = None,
        *,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady, self._wall = steady, wall
        self._offset_s = max(wall(), latest or 0.0) - steady()

    @classmethod
    def of(cls, store: RunStore, **clocks: Callable[[], float]) -> Self:
        """Make the clock for the run in the store.

        Raises:
            StoreError: the store is damaged.
        """
        state = read_engine(store)
        return cls(None if state is None else state.timing.seen_at, **clocks)

    def __call__(self) -> float:
        return self._offset_s + self._steady()

    @property
    def ahead_s(self) -> float:
        """Seconds that the time of day is ahead of this clock; 0 until the time of day is set."""
        return self._wall() - self()


def schedule_of(section: ScheduleSection) -> Schedule:
    """Return the schedule that a run's [schedule] describes, in its time zone."""
    from zoneinfo import ZoneInfo

    zone = UTC if section.zone == UTC_NAME else None if section.zone is None else ZoneInfo(section.zone)
    return Schedule(section, zone)
