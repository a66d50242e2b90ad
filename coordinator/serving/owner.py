"""What does not come over the network: its owner's orders for a run, and the clock on the wall."""

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from fleetune.coordinator.rounds.events import ClockSet, Paused
from fleetune.coordinator.run.stored_run import Run
from fleetune.coordinator.serving.event_queue import Stop
from fleetune.coordinator.store.folder_lock import is_claimed
from fleetune.coordinator.store.orders import ORDERS, Orders, read_orders, write_orders
from fleetune.protocols.errors import StoreError

log = logging.getLogger(__name__)

SUPERVISED = "FLEETUNE_SUPERVISED"  # set in the environment of a service's runs
LOOK_EVERY_S = 0.5
SET_S = 1.0  # a clock that is off by less was not set, or it does not matter
_Mark = tuple[int, int, int] | None


class Owner:
    """Looks now and then for orders, and for clocks that were set.

    Args:
        run: the run.
        ahead_s: by how much the time of day is ahead of the run's clock.
    """

    def __init__(self, run: Run, ahead_s: Callable[[], float]) -> None:
        self._run = run
        self._ahead_s = ahead_s
        self._path = run.folder / ORDERS
        self._mark: _Mark = (0, 0, 0)  # of no file
        self._orders = Orders()
        self._look_at = float("-inf")

    def look(self, now: float) -> list[ClockSet | Paused | Stop]:
        """What the run is to be told at `now`, by a clock that never jumps."""
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_EVERY_S
        state, found = self._run.controller.engine_state, list[ClockSet | Paused | Stop]()
        ahead_s = self._ahead_s()
        if abs(ahead_s - state.ahead_s) > SET_S:
            if not self._run.settings.schedule.is_free:
                log.warning("the clock was set: the time of day moved by %+.0f s", ahead_s - state.ahead_s)
            found.append(ClockSet(ahead_s))
        self._read()
        if self._orders.paused != state.paused:
            found.append(Paused(self._orders.paused))
        if self._orders.stopped:
            found.append(Stop())
        return found

    def _read(self) -> None:
        mark = _mark(self._path)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._orders = read_orders(self._run.folder)
        except StoreError as problem:
            log.warning("%s; what was ordered before stands", problem)


def order(folder: Path, **changes: bool) -> str:
    """Give an order for the run in a folder, beside those that stand; what follows from it, in a line.

    Args:
        folder: of the run.
        changes: of `Orders`.

    Raises:
        StoreError: the order cannot be written.
    """
    wanted = replace(read_orders(folder), **changes)
    write_orders(folder, wanted)
    there = is_claimed(folder)
    if wanted.stopped:
        return f"{folder}: stopped" if not there else f"{folder} is being stopped; serve it again to go on"
    what = "no new round opens until it is resumed" if wanted.paused else "rounds open when they are due"
    return f"{folder}: {what}" + ("" if there else "; no coordinator is at it")


def take_up(folder: Path) -> None:
    """Whoever serves a run wants it to go on: an order to stop it is over. Raises StoreError."""
    standing = read_orders(folder)
    if standing.stopped:
        write_orders(folder, replace(standing, stopped=False))


def _mark(path: Path) -> _Mark:
    """What changes when the file is replaced."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
