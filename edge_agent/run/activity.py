"""What an agent is at just now, for whoever embeds it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

CONNECTED = "connected"


@dataclass(frozen=True)
class Activity:
    """What an agent is at.

    Attributes:
        connection: "connected", "connecting", or why it is not connected.
        run: that it has joined, by its id; None: none just now.
        round: that it works on or, between rounds, worked on last; 0: none of this run yet.
        training: whether it works on a task.
        resting: why it takes no part just now; None: nothing is in the way.
        finished: the run that is over; None: none is, or another has begun.
    """

    connection: str = "connecting"
    run: str | None = None
    round: int = 0
    training: bool = False
    resting: str | None = None
    finished: str | None = None


class Noted:
    """The latest, and who is told when it changes."""

    def __init__(self, tell: Callable[[Activity], None]) -> None:
        self._activity, self._tell = Activity(), tell

    def note(self, **what: Any) -> None:
        """These attributes are so from now on."""
        before, self._activity = self._activity, replace(self._activity, **what)
        if self._activity != before:
            self._tell(self._activity)
