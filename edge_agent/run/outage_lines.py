"""What an agent's log says while its broker is not reached."""

from dataclasses import dataclass

REPEAT_S = 600.0


@dataclass
class OutageLines:
    """Says each reason once, and the same one again every `REPEAT_S`.

    Attributes:
        reason: that was said last; "": the broker is reached.
        said_at: when.
    """

    reason: str = ""
    said_at: float = 0.0

    def line(self, reason: str, now: float, finished: str | None) -> str:
        """The line to log, or "" for none.

        Args:
            reason: why the broker is not reached.
            now: seconds that never jump.
            finished: the run that was over last, when no other has begun.
        """
        if reason == self.reason and now - self.said_at < REPEAT_S:
            return ""
        self.reason, self.said_at = reason, now
        if finished is None:
            return f"not connected: {reason}"
        return (
            f"not connected: {reason}; run {finished} is over, and its broker may have ended with it: this"
            " agent waits for the next run (Ctrl-C stops it; with --leave-after-run it ends by itself)"
        )

    def connected(self) -> None:
        """The broker is reached."""
        self.reason = ""
