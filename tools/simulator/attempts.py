"""Rounds that never close: on a virtual clock they would be tried for ever."""

from fleetune.coordinator.rounds.engine_state import Turn
from fleetune.coordinator.run.run_events import ReplyRefused, RoundAbandoned, RoundClosed
from fleetune.protocols.errors import SettingError
from fleetune.protocols.wire.messages import readable

MOST_ATTEMPTS = 300  # at one round
MOST_OVERDUE = 20  # attempts at one round that end at the deadline though all devices are there
MOST_REFUSED = 5  # attempts at one round, of which updates were refused: training is the same in the next


class Attempts:
    """At the round at hand.

    Args:
        all_are_there: no device comes or goes, so that one attempt is much like the next.
    """

    def __init__(self, *, all_are_there: bool) -> None:
        self._refused: dict[int, ReplyRefused] = {}  # the last one of each attempt
        self._all_are_there = all_are_there
        self._overdue, self._absent = 0, ""

    def note(self, event: object) -> None:
        """What came of an attempt."""
        if isinstance(event, RoundClosed):
            self._refused.clear()
            self._overdue = 0
        elif isinstance(event, ReplyRefused):
            self._refused[event.attempt] = event
        elif isinstance(event, RoundAbandoned) and event.reason == "deadline" and self._all_are_there:
            self._overdue, self._absent = self._overdue + 1, readable(", ".join(event.absent))

    def check(self, turn: Turn) -> None:
        """Raises SettingError: it has been tried often enough."""
        number, attempt = turn
        if len(self._refused) > MOST_REFUSED:
            last = self._refused[max(self._refused)]
            raise SettingError(
                f"round {number} was tried {attempt - 1} times, and updates are refused ({last.device}:"
                f" {last.problem}); are samples scaled (data.mean, data.std)? See round.max_strain"
            )
        if self._overdue >= MOST_OVERDUE:
            raise SettingError(
                f"round {number} was tried {attempt - 1} times, and too few devices answered by its deadline"
                f" (not {self._absent}); raise round.deadline_s, or lower round.quorum"
            )
        if attempt > MOST_ATTEMPTS:
            raise SettingError(
                f"round {number} was tried {MOST_ATTEMPTS} times and never had enough updates that"
                " count; see round.quorum, round.deadline_s, round.max_strain, and whether training diverges"
            )
