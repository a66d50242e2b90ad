"""Limits that end a simulation without progress, because a virtual clock could run forever."""

from collections import deque

from fleetune.coordinator.rounds.engine_state import RoundAttempt
from fleetune.coordinator.run.run_events import ReplyRefused, RoundAbandoned, RoundClosed
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.protocols.wire.messages import readable
from fleetune.tools.simulator.event_queue import SimulationEvent

MOST_ATTEMPTS = 300  # maximum number of attempts at one round
MOST_OVERDUE = 20  # attempts at one round that reach the deadline although all devices are connected
MOST_REFUSED = 5  # attempts at one round with refused updates: the next attempt trains in the same way
MOST_BOUNCES = 20  # times that a device gets one task again while it stays connected
MOST_EVENTS_A_DEVICE = 20  # at one time, in one attempt at a round; a healthy device has at most 6
MOST_EVENTS = 1_000  # at one time, for the fleet as a whole
_SHOWN_EVENTS = 10


class ProgressGuard:
    """Counts the events of one simulation, and raises an error beyond a limit.

    Args:
        num_devices: number of devices in the fleet; limits the number of events at one time.
        always_connected: True if no device disconnects, so that all attempts are alike.
    """

    def __init__(self, num_devices: int, *, always_connected: bool) -> None:
        self._most_events = MOST_EVENTS + MOST_EVENTS_A_DEVICE * num_devices
        self._always_connected = always_connected
        self._moment: tuple[float, tuple[int, int]] = -1.0, (0, 0)
        self._num_events = 0
        self._sends: dict[str, tuple[tuple[int, int], int]] = {}
        self._last = deque[tuple[float, str, str]](maxlen=_SHOWN_EVENTS)
        self._refused: dict[int, ReplyRefused] = {}  # the last refusal of each attempt
        self._num_overdue, self._absent = 0, ""

    def note_event(self, now: float, round_attempt: tuple[int, int], event: SimulationEvent) -> None:
        """Count an event. Raises FleetuneError if virtual time does not advance."""
        self._last.append((now, type(event).__name__, getattr(event, "device", "")))
        if (now, round_attempt) != self._moment:
            self._moment, self._num_events = (now, round_attempt), 0
        self._num_events += 1
        if self._num_events > self._most_events:
            raise self._fault(
                f"{self._num_events} events happened and virtual time stands still", round_attempt
            )

    def note_sent(self, device: str, round_attempt: tuple[int, int]) -> None:
        """Count a sent task. Raises FleetuneError if the device got the same task too often."""
        before, times = self._sends.get(device, (round_attempt, 0))
        times = times + 1 if before == round_attempt else 1
        self._sends[device] = round_attempt, times
        if times > MOST_BOUNCES + 1:
            raise self._fault(f"{device} was sent its task {times} times", round_attempt)

    def note_reconnected(self, device: str) -> None:
        """Allow a device that was disconnected to get its task again."""
        self._sends.pop(device, None)

    def note_outcome(self, event: object) -> None:
        """Count refused updates and abandoned attempts of the open round."""
        if isinstance(event, RoundClosed):
            self._refused.clear()
            self._num_overdue = 0
        elif isinstance(event, ReplyRefused):
            self._refused[event.attempt] = event
        elif isinstance(event, RoundAbandoned) and event.reason == "deadline" and self._always_connected:
            self._num_overdue, self._absent = self._num_overdue + 1, readable(", ".join(event.absent))

    def check_attempts(self, round_attempt: RoundAttempt) -> None:
        """Raise SettingError if the open round was tried too often."""
        number, attempt = round_attempt
        if len(self._refused) > MOST_REFUSED:
            last = self._refused[max(self._refused)]
            raise SettingError(
                f"round {number} was tried {attempt - 1} times, and updates are refused ({last.device}:"
                f" {last.problem}); are samples scaled (data.mean, data.std)? See round.norm_bound"
            )
        if self._num_overdue >= MOST_OVERDUE:
            raise SettingError(
                f"round {number} was tried {attempt - 1} times, and too few devices answered by its deadline"
                f" (not {self._absent}); raise round.deadline_s, or lower round.quorum"
            )
        if attempt > MOST_ATTEMPTS:
            raise SettingError(
                f"round {number} was tried {MOST_ATTEMPTS} times and never had enough updates that"
                " count; see round.quorum, round.deadline_s, round.norm_bound, and whether training diverges"
            )

    def _fault(self, what: str, round_attempt: tuple[int, int]) -> FleetuneError:
        number, attempt = round_attempt
        line = (
            f"the simulation makes no progress: {what} in round {number}, attempt {attempt};"
            " please report this with run.toml and the last events"
        )
        events = (f"  {now:.6f} s {name} {device}" for now, name, device in self._last)
        return FleetuneError("\n".join([line, *events]))
