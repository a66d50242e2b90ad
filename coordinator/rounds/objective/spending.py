"""What a run has taken so far, held against what it may take (`[objective] within`).

Counted is every reply that was taken, of rounds that closed or not: what was sent is paid for. No round opens
that would go beyond a limit if it took as much as the latest one did; the first one, if it took the least
that its participants could do. So a limit is kept but for a round that takes more than the one before, and
for the final evaluation, whose replies are small.
"""

from dataclasses import dataclass, replace
from typing import Self

from fleetune.protocols.settings.objective import WithinSection

MEGABYTE = 1e6
NO_LIMITS = WithinSection()


@dataclass(frozen=True)
class Amounts:
    """Of a run or a round: seconds, megabytes that devices sent, joules that they drew, where they tell."""

    seconds: float = 0.0
    megabytes: float = 0.0
    joules: float = 0.0

    def since(self, before: Self) -> Self:
        """The difference."""
        mine, theirs = (self.seconds, self.megabytes, self.joules), before
        return type(self)(mine[0] - theirs.seconds, mine[1] - theirs.megabytes, mine[2] - theirs.joules)


@dataclass(frozen=True)
class Spending:
    """Of a run.

    Attributes:
        began_at: when its first round opened, on the run's clock; None: it has not.
        megabytes, joules: until now.
        closed: when the latest round closed.
        latest: what that round took, with what was in vain before it; None: none has closed.
    """

    began_at: float | None = None
    megabytes: float = 0.0
    joules: float = 0.0
    closed: Amounts = Amounts()
    latest: Amounts | None = None

    def opened(self, now: float) -> Self:
        """A round opens."""
        return replace(self, began_at=now) if self.began_at is None else self

    def replied(self, num_bytes: int, joules: float | None) -> Self:
        """A reply was taken; `joules`: None: it does not tell."""
        megabytes = self.megabytes + num_bytes / MEGABYTE
        return replace(self, megabytes=megabytes, joules=self.joules + (joules or 0.0))

    def round_closed(self, now: float) -> Self:
        """A round closes."""
        taken = self.taken(now)
        return replace(self, closed=taken, latest=taken.since(self.closed))

    def taken(self, now: float) -> Amounts:
        """Until now."""
        return Amounts(0.0 if self.began_at is None else now - self.began_at, self.megabytes, self.joules)


def why_over(within: WithinSection, spending: Spending, now: float, least: Amounts) -> str | None:
    """Why no round should open, for people; None: one may.

    Args:
        within: the limits.
        spending: so far.
        now: on the run's clock.
        least: that the first round takes, as far as devices say.
    """
    taken, latest = spending.taken(now), spending.latest
    for name in within.__struct_fields__:
        limit, spent = getattr(within, name), getattr(taken, name)
        coming = getattr(least if latest is None else latest, name)
        if limit is None or spent + coming <= limit:
            continue
        if latest is None:
            return f"objective.within.{name} = {limit:g}: a round takes {coming:.3g} at least"
        return f"objective.within.{name} = {limit:g}: {spent:.4g} are spent, and a round takes {coming:.3g}"
    return None
