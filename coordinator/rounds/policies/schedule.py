"""Decides when the next round may open: a pure function of [schedule], the `ScheduleState`, and the time.

There are two clocks. The run's clock is steady; it measures `every`. The time of day decides `window`: it is
the run's clock plus `Timing.ahead_s`. The driver sends a new `ahead_s` when the machine's clock is set.

With a window, `every` counts from the opening of the window in which the last round became due. So a round
that opens late does not delay the next one, and setting the clock back gives no second round in one night.
"""

import math
from dataclasses import dataclass, replace
from datetime import date, datetime, time, timedelta, tzinfo

from fleetune.coordinator.rounds.engine_state import ScheduleState
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.schedule import DAY_S, ScheduleSection

DRIFT_THRESHOLD = 1.0  # a device that reports at least this drift reports that training would pay
_CLOCK_CHANGE_S = 3600.0  # daylight saving moves the openings of windows by an hour
_GREATEST_S = 2.0**35  # year 3058: a device's clock may show any time, but a calendar has an end


@dataclass(frozen=True)
class Look:
    """Result of checking the schedule.

    Attributes:
        plan: the new state of the schedule.
        again_at: time of the next check if no round is due, on the run's clock; None to wait for a device's
            report.
    """

    plan: ScheduleState
    again_at: float | None = None


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run.

    Attributes:
        settings: the section [schedule].
        zone: time zone of its times of day; None: that of this machine.
    """

    settings: ScheduleSection = ScheduleSection()  # noqa: RUF009 - frozen
    zone: tzinfo | None = None

    def pays(self, report: DeviceReport) -> bool:
        """True if the device reports enough new data that training would pay."""
        wanted, new, drift = self.settings.new_samples, report.new_samples, report.drift
        enough = wanted is not None and isinstance(new, int) and new >= wanted
        return enough or (self.settings.drift and isinstance(drift, float) and drift >= DRIFT_THRESHOLD)

    def look(self, plan: ScheduleState, now: float, ahead_s: float, telling: int, rounds_done: int) -> Look:
        """Check whether a round, or another attempt at one, may open.

        Args:
            plan: the state of the schedule so far.
            now: time on the run's clock, in seconds.
            ahead_s: seconds that the time of day is ahead of `now`, see `Timing`.
            telling: number of devices that report that training would pay.
            rounds_done: number of closed rounds.
        """
        settings, every_s = self.settings, self.settings.every_s or 0.0
        if settings.is_free or rounds_done < settings.first_rounds:
            since = now if settings.hours is None else None
            return Look(plan if plan.due else replace(plan, due=True, since=since))
        opening = now
        if settings.hours is not None:
            opening = self._opening(now + ahead_s, *settings.hours) - ahead_s
            every_s -= _CLOCK_CHANGE_S if every_s >= DAY_S else 0.0
        if opening > now:
            return Look(replace(plan, due=False), opening)
        next_at = -math.inf if plan.since is None else plan.since + every_s
        if plan.due or next_at > now:
            return Look(plan, None if plan.due else next_at)
        wanted = not settings.asks_devices or telling >= settings.devices
        return Look(replace(plan, due=True, since=max(opening, next_at)) if wanted else plan)

    def local_time(self, at_s: float) -> datetime:
        """Return date and time of day in the schedule's time zone, for a time in seconds since 1970 (UTC)."""
        return datetime.fromtimestamp(_known(at_s), self.zone)

    def instant(self, day: date, of_day: time) -> float:
        """Return a local date and time of day as seconds since 1970 (UTC).

        A time of day that daylight saving skips becomes an hour later. For one that occurs twice, the first
        counts.
        """
        return datetime.combine(day, of_day, self.zone).timestamp()

    def _opening(self, at_s: float, first: time, last: time) -> float:
        """Return when the open window opened, or when the next window opens, in seconds since 1970 (UTC)."""
        today, over = self.local_time(at_s).date(), timedelta(days=int(last <= first))
        for day in (today + timedelta(days=days) for days in (-1, 0)):
            start, end = self.instant(day, first), self.instant(day + over, last)
            # daylight saving may skip the whole window, which is then taken an hour later
            if _known(at_s) < (end if end > start else start + _CLOCK_CHANGE_S):
                return start
        return self.instant(today + timedelta(days=1), first)


def _known(at_s: float) -> float:
    """Return seconds since 1970, limited to the range that a calendar can represent."""
    return min(max(at_s, 0.0), _GREATEST_S) if math.isfinite(at_s) else 0.0
