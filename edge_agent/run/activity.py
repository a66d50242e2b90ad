"""What an agent does just now, for the program that embeds it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

CONNECTED = "connected"


@dataclass(frozen=True)
class Activity:
    """What an agent does.

    Attributes:
        connection: "connected", "connecting", or why it is not connected.
        run: id of the run that it has joined; None: none just now.
        round: that it works on or, between rounds, worked on last; 0: none of this run yet.
        training: whether it works on a task.
        resting: why it takes no part just now; None: it takes part.
        finished: the run that is over; None: none is, or another has started.
    """

    connection: str = "connecting"
    run: str | None = None
    round: int = 0
    training: bool = False
    resting: str | None = None
    finished: str | None = None


class ActivityNotifier:
    """Holds the latest activity, and calls `tell` when it changes."""

    def __init__(self, tell: Callable[[Activity], None]) -> None:
        self._activity, self._tell = Activity(), tell

    def note(self, **changes: Any) -> None:
        """Replace these attributes of the activity."""
        before, self._activity = self._activity, replace(self._activity, **changes)
        if self._activity != before:
            self._tell(self._activity)
