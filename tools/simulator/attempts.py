"""Rounds that never close: on a virtual clock they would be tried for ever."""

from fleetune.coordinator.rounds.engine_state import Turn
from fleetune.coordinator.run.run_events import ReplyRefused, RoundClosed
from fleetune.protocols.errors import SettingError

MOST_ATTEMPTS = 300  # at one round
MOST_REFUSED = 5  # attempts at one round, of which updates were refused: training is the same in the next


class Attempts:
    """At the round at hand."""

    def __init__(self) -> None:
        self._refused: dict[int, ReplyRefused] = {}  # the last one of each attempt

    def note(self, event: object) -> None:
        """What came of an attempt."""
        if isinstance(event, RoundClosed):
            self._refused.clear()
        elif isinstance(event, ReplyRefused):
            self._refused[event.attempt] = event

    def check(self, turn: Turn) -> None:
        """Raises SettingError: it has been tried often enough."""
        number, attempt = turn
        if len(self._refused) > MOST_REFUSED:
            last = self._refused[max(self._refused)]
            raise SettingError(
                f"round {number} was tried {attempt - 1} times, and updates are refused ({last.device}:"
                f" {last.problem}); are samples scaled (data.mean, data.std)? See round.max_strain"
            )
        if attempt > MOST_ATTEMPTS:
            raise SettingError(
                f"round {number} was tried {MOST_ATTEMPTS} times and never had enough updates that"
                " count; see round.quorum, round.deadline_s, round.max_strain, and whether training diverges"
            )
