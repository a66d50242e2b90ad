"""Watches the run's control file and the machine's clock."""

import logging
from collections.abc import Callable, Container

from fleetune.coordinator.commands.control_file import Control, read_control
from fleetune.coordinator.rounds.events import ClockSet, Paused
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.event_queue import Reopen, Stop
from fleetune.coordinator.store.run_folder import CONTROL
from fleetune.protocols.errors import StoreError
from fleetune.protocols.files import FileMark, mark_of

log = logging.getLogger(__name__)

SUPERVISED = "FLEETUNE_SUPERVISED"  # set in the environment of a service's runs
LOOK_EVERY_S = 0.5
SET_S = 1.0  # seconds; a smaller change of the clock is drift


class ControlWatch:
    """Checks regularly for requests in the control file, and for jumps of the machine's clock.

    Args:
        run: the run.
        ahead_s: function that returns how many seconds the time of day is ahead of the run's clock.
        not_now: devices whose removal failed; requests to forget them wait.
    """

    def __init__(self, run: Run, ahead_s: Callable[[], float], not_now: Container[str] = frozenset()) -> None:
        self._run = run
        self._not_now = not_now
        self._ahead_s = ahead_s
        self._path = run.folder / CONTROL
        self._mark: FileMark | None = (0, 0, 0)  # differs from every file, so that the first look reads it
        self._control = Control()
        self._look_at = float("-inf")

    def look(self, now: float) -> list[ClockSet | Paused | Stop]:
        """Return the events that the run must handle at `now`, in seconds of a monotonic clock."""
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_EVERY_S
        state, found = self._run.controller.engine_state, list[ClockSet | Paused | Stop]()
        ahead_s = self._ahead_s()
        if abs(ahead_s - state.timing.ahead_s) > SET_S:
            if not self._run.settings.schedule.is_free:
                log.warning(
                    "the clock was set: the time of day moved by %+.0f s", ahead_s - state.timing.ahead_s
                )
            found.append(ClockSet(ahead_s))
        self._read()
        if self._control.paused != state.paused:
            found.append(Paused(self._control.paused))
        if self._control.stopped:
            found.append(Stop())
        elif any(device not in self._not_now for device in self._control.forget):
            found.append(Reopen())
        return found

    def _read(self) -> None:
        mark = mark_of(self._path)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._control = read_control(self._run.folder)
        except StoreError as problem:
            log.warning("%s; earlier requests stay in force", problem)
