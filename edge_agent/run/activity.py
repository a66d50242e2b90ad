"""The agent's current activity, for the program that embeds it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

CONNECTED = "connected"


@dataclass(frozen=True)
class Activity:
    """The agent's current activity.

    Attributes:
        connection: "connected", "connecting", or the reason why it is not connected.
        run: id of the joined run; None if no run is joined.
        round: the current round or, between rounds, the last one; 0 before the first round of the run.
        training: True while the agent works on a task.
        resting: the reason why the device takes no part at present; None if it takes part.
        finished: id of the last finished run; None if there is none or another run has started.
    """

    connection: str = "connecting"
    run: str | None = None
    round: int = 0
    training: bool = False
    resting: str | None = None
    finished: str | None = None


class ActivityNotifier:
    """Stores the latest activity, and calls `tell` with each change."""

    def __init__(self, tell: Callable[[Activity], None]) -> None:
        self._activity, self._tell = Activity(), tell

    def note(self, **changes: Any) -> None:
        """Replace these attributes of the activity."""
        before, self._activity = self._activity, replace(self._activity, **changes)
        if self._activity != before:
            self._tell(self._activity)
