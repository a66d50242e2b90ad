"""Whether a simulation makes progress: a fault that repeats events for ever ends it with one line."""

from collections import deque

from fleetune.protocols.errors import FleetuneError
from fleetune.tools.simulator.event_queue import SimulationEvent

MOST_BOUNCES = 20  # times that a device is sent one task again, without having been away
MOST_EVENTS_A_DEVICE = 20  # at one moment, in one attempt at a round; a healthy device has 6 at most
MOST_EVENTS = 1_000  # likewise, of the fleet itself
_SHOWN_EVENTS = 10

Turn = tuple[int, int]


class ProgressGuard:
    """Watches the events of one simulation.

    Args:
        num_devices: of the fleet: so many more events may happen at one moment.
    """

    def __init__(self, num_devices: int) -> None:
        self._most_events = MOST_EVENTS + MOST_EVENTS_A_DEVICE * num_devices
        self._moment: tuple[float, Turn] = -1.0, (0, 0)
        self._events = 0
        self._sends: dict[str, tuple[Turn, int]] = {}
        self._last = deque[tuple[float, str, str]](maxlen=_SHOWN_EVENTS)

    def note(self, now: float, turn: Turn, happening: SimulationEvent) -> None:
        """An event is due. Raises FleetuneError: virtual time stands still."""
        self._last.append((now, type(happening).__name__, getattr(happening, "device", "")))
        if (now, turn) != self._moment:
            self._moment, self._events = (now, turn), 0
        self._events += 1
        if self._events > self._most_events:
            self._end(f"{self._events} events happened and virtual time stands still", turn)

    def note_sent(self, device: str, turn: Turn) -> None:
        """A device is sent its task. Raises FleetuneError: it bounces."""
        before, times = self._sends.get(device, (turn, 0))
        times = times + 1 if before == turn else 1
        self._sends[device] = turn, times
        if times > MOST_BOUNCES + 1:
            self._end(f"{device} was sent its task {times} times", turn)

    def note_back(self, device: str) -> None:
        """A device was away: it is sent its task again."""
        self._sends.pop(device, None)

    def _end(self, what: str, turn: Turn) -> None:
        number, attempt = turn
        line = (
            f"the simulation makes no progress: {what} in round {number}, attempt {attempt};"
            " please report this with run.toml and the last events"
        )
        raise FleetuneError(
            "\n".join([line, *(f"  {now:.6f} s {name} {one}" for now, name, one in self._last)])
        )
