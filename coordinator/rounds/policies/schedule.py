"""When the next round may open: a pure function of [schedule], the stored `ScheduleState`, and the time.

There are two clocks. The run's clock is steady; it counts `every`. The time of day decides `at` and `window`:
it is the run's clock plus `EngineState.ahead_s`. The driver sends the engine a new `ahead_s` when a clock is
set.

Each day has one slot. A slot begins at `at` (see `civil_time.instant`, also for daylight saving time) and
ends when the next one begins. `ScheduleState.day` is the slot that was used last, so that a changed clock
never opens two rounds in one slot:

- A clock was set back: the slot was used already. If it had been ahead by days, today's slot counts as used.
- A clock was set ahead, or no device was connected: today's slot is used as soon as `window` allows. Slots
  that passed are counted (`ScheduleState.missed`). They are not made up one by one.
"""

from dataclasses import dataclass, replace

from fleetune.coordinator.rounds.engine_state import ScheduleState
from fleetune.coordinator.rounds.policies.civil_time import Zone, day_of, instant, utc
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.schedule import DAY_S, ScheduleSection

DRIFT_THRESHOLD = 1.0  # a device that reports at least this drift reports that training would pay


@dataclass(frozen=True)
class Look:
    """Result of checking the schedule.

    Attributes:
        plan: the new state of the schedule.
        again_at: when to check again if no round is due, on the run's clock; None: when a device reports.
    """

    plan: ScheduleState
    again_at: float | None = None


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run.

    Attributes:
        settings: the section [schedule].
        zone: time zone of its times of day.
    """

    settings: ScheduleSection = ScheduleSection()  # noqa: RUF009 - frozen
    zone: Zone = lambda _: 0.0

    def pays(self, report: DeviceReport) -> bool:
        """True if the device reports that training would pay."""
        wanted, new, drift = self.settings.new_samples, report.new_samples, report.drift
        enough = wanted is not None and isinstance(new, int) and new >= wanted
        return enough or (self.settings.drift and isinstance(drift, float) and drift >= DRIFT_THRESHOLD)

    def look(self, plan: ScheduleState, now: float, ahead_s: float, telling: int, rounds_done: int) -> Look:
        """Check whether a round, or another attempt at one, may open.

        Args:
            plan: the state of the schedule so far.
            now: on the run's clock, seconds.
            ahead_s: seconds that the time of day is ahead of `now`, see `EngineState`.
            telling: number of devices that report that training would pay.
            rounds_done: number of closed rounds.
        """
        if self.settings.is_free:
            return Look(plan if plan.due else replace(plan, due=True))
        if rounds_done < self.settings.first_rounds:
            return Look(plan if plan.due else replace(plan, due=True, since=now))
        wanted = not self.settings.asks_devices or telling >= self.settings.devices
        if self._slot_s is not None:
            return self._in_days(plan, now, ahead_s, wanted=wanted)
        return self._in_spans(plan, now, ahead_s, wanted=wanted)

    @property
    def _slot_s(self) -> int | None:
        """When each day's slot begins, in seconds since midnight; None if rounds follow `every` instead."""
        settings = self.settings
        if settings.at_s is not None:
            return settings.at_s
        whole_days = settings.every_s is not None and settings.every_s % DAY_S == 0
        return settings.window_s[0] if settings.window_s is not None and whole_days else None

    def _in_days(self, plan: ScheduleState, now: float, ahead_s: float, *, wanted: bool) -> Look:
        civil, step = utc(now + ahead_s), (self.settings.every_s or DAY_S) // DAY_S
        slot = self._slot(civil)
        opens = civil < self._closes(slot)
        day = self._used(plan, slot, step, opens=opens)
        again_at = self._begin(slot + step) - ahead_s
        if slot < day + step:
            due = plan.due and opens
            missed = plan.missed + int(plan.due and not due)
            return Look(replace(plan, due=due, day=day, missed=missed), self._begin(day + step) - ahead_s)
        asks = self.settings.asks_devices
        went_by = 0 if asks else (slot - day) // step - int(not plan.due)
        plan = replace(plan, day=slot, missed=plan.missed + went_by)
        if opens and (wanted or plan.due):
            return Look(replace(plan, due=True, since=now), again_at)
        if opens and self.settings.window is not None:  # devices may report until the slot ends
            return Look(replace(plan, day=slot - step))
        missed = plan.missed + int(not asks or plan.due)
        return Look(replace(plan, due=False, missed=missed), again_at)

    def _used(self, plan: ScheduleState, slot: int, step: int, *, opens: bool) -> int:
        """The slot that was used last. A new schedule begins with the next slot, or in a window that is
        open.
        """
        if plan.day is None:
            return slot - step if opens and self.settings.window is not None else slot + 1 - step
        return slot if plan.day > slot + step else plan.day

    def _in_spans(self, plan: ScheduleState, now: float, ahead_s: float, *, wanted: bool) -> Look:
        civil, every_s = utc(now + ahead_s), self.settings.every_s or 0.0
        opens = self._opens(civil)
        if opens > civil:
            missed = plan.missed + int(plan.due)
            return Look(replace(plan, due=False, missed=missed), opens - ahead_s)
        next_at = now if plan.since is None else plan.since + every_s
        if not plan.due and next_at > now:
            return Look(plan, next_at)
        if plan.due or wanted:
            return Look(plan if plan.due else replace(plan, due=True, since=now))
        return Look(plan)

    def _begin(self, day: int) -> float:
        """When the slot of a day begins, as time of day."""
        assert self._slot_s is not None, "called only if the schedule has slots of days"
        return instant(day, self._slot_s, self.zone)

    def _slot(self, civil: float) -> int:
        today = day_of(civil, self.zone)
        return today if civil >= self._begin(today) else today - 1

    def _closes(self, slot: int) -> float:
        """Until when a round may open in a slot: the end of the window in which the slot begins."""
        if self.settings.window_s is None:
            return float("inf")
        begin = self._begin(slot)
        around = (self._window(day) for day in (slot - 1, slot))
        return next((end for start, end in around if start <= begin < end), begin)

    def _opens(self, civil: float) -> float:
        """When the open window opened, or the next one opens, as time of day."""
        if self.settings.window_s is None:
            return civil
        today = day_of(civil, self.zone)
        windows = (self._window(day) for day in (today - 1, today, today + 1, today + 2))
        return next((start for start, end in windows if end > civil), civil)

    def _window(self, day: int) -> tuple[float, float]:
        """Start and end of a day's window. A start that daylight saving skips moves to the end of the
        skipped hour; the length stays.
        """
        assert self.settings.window_s is not None, "called only if the schedule has a window"
        start_s, span_s = self.settings.window_s
        last_day, last_s = divmod(start_s + span_s, DAY_S)
        start, end = instant(day, start_s, self.zone), instant(day + last_day, last_s, self.zone)
        return start, end if end > start else start + span_s
