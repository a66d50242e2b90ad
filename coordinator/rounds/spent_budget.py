"""What a run has spent, and whether another round fits its budget (`[objective] within`).

Every accepted reply counts, also those of rounds that did not close. A round opens only if its predicted
cost, that of the latest round, fits the limits. The first round is estimated by the least that its
participants can do. So a run can exceed a limit only in two ways: by a round that costs more than the one
before it, and by the final evaluation, whose replies are small.
"""

from dataclasses import dataclass, replace
from typing import Self

from fleetune.protocols.settings.objective import WithinSection

MEGABYTE = 1e6
NO_LIMITS = WithinSection()


@dataclass(frozen=True)
class Amounts:
    """Seconds, megabytes that devices sent, and joules that devices report, of a run or a round."""

    seconds: float = 0.0
    megabytes: float = 0.0
    joules: float = 0.0

    def since(self, before: Self) -> Self:
        """The difference to an earlier amount."""
        return type(self)(
            self.seconds - before.seconds, self.megabytes - before.megabytes, self.joules - before.joules
        )


@dataclass(frozen=True)
class SpentBudget:
    """What a run has spent.

    Attributes:
        began_at: when its first round opened, on the run's clock; None: no round has opened.
        megabytes, joules: spent so far.
        closed: what was spent when the latest round closed.
        latest: what that round cost, with failed attempts before it; None: no round has closed.
    """

    began_at: float | None = None
    megabytes: float = 0.0
    joules: float = 0.0
    closed: Amounts = Amounts()
    latest: Amounts | None = None

    def opened(self, now: float) -> Self:
        """The budget after a round opened."""
        return replace(self, began_at=now) if self.began_at is None else self

    def replied(self, num_bytes: int, joules: float | None) -> Self:
        """The budget after a reply was accepted. `joules` is None if the device does not report them."""
        megabytes = self.megabytes + num_bytes / MEGABYTE
        return replace(self, megabytes=megabytes, joules=self.joules + (joules or 0.0))

    def round_closed(self, now: float) -> Self:
        """The budget after a round closed."""
        spent = self.until(now)
        return replace(self, closed=spent, latest=spent.since(self.closed))

    def until(self, now: float) -> Amounts:
        """The amounts spent until `now`."""
        return Amounts(0.0 if self.began_at is None else now - self.began_at, self.megabytes, self.joules)


def over_budget(within: WithinSection, spent: SpentBudget, now: float, least: Amounts) -> str | None:
    """The reason why the next round exceeds the budget; None: it fits.

    Args:
        within: the limits.
        spent: what the run has spent so far.
        now: on the run's clock.
        least: the least that the first round costs, as far as devices report it.
    """
    used, latest = spent.until(now), spent.latest
    for name in within.__struct_fields__:
        limit, amount = getattr(within, name), getattr(used, name)
        coming = getattr(least if latest is None else latest, name)
        if limit is None or amount + coming <= limit:
            continue
        if latest is None:
            return f"objective.within.{name} = {limit:g}: the first round needs at least {coming:.3g}"
        return (
            f"objective.within.{name} = {limit:g}: {amount:.4g} are spent,"
            f" and the next round needs about {coming:.3g}"
        )
    return None
