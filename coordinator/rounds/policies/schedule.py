"""When the next round may open: a pure function of [schedule], of what the engine remembers, and of the time.

There are two clocks. The run's clock is steady; it counts `every`. The time of day decides `at` and `window`:
it is the run's clock plus `EngineState.ahead_s`. The driver sends the engine a new `ahead_s` when a clock is
set.

Each day has one slot. A slot begins at `at` (see `civil_time.instant`, also for summer time) and ends when
the next one begins. `ScheduleState.day` is the slot that was used last, so that a changed clock never opens
two rounds in one slot:

- A clock was set back: the slot was used already. If it had been ahead by days, today's slot counts as used.
- A clock was set ahead, or no device was there: today's slot is used as soon as `window` allows. Slots that
  went by are counted (`ScheduleState.missed`). They are not made up one by one.
"""

from dataclasses import dataclass, replace

from fleetune.coordinator.rounds.engine_state import ScheduleState
from fleetune.coordinator.rounds.policies.civil_time import Zone, day_of, instant, utc
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.schedule import DAY_S, ScheduleSection

TOLD = 1.0  # a device that reports so much drift says that training would pay


@dataclass(frozen=True)
class Look:
    """What looking at the time comes to.

    Attributes:
        plan: as it is from now on.
        again_at: when to look again if it is not due, on the run's clock; None: when a device says something.
    """

    plan: ScheduleState
    again_at: float | None = None


@dataclass(frozen=True)
class Schedule:
    """A run's [schedule].

    Attributes:
        settings: its keys.
        zone: of its times of day.
    """

    settings: ScheduleSection = ScheduleSection()  # noqa: RUF009 - frozen
    zone: Zone = lambda _: 0.0

    def pays(self, report: DeviceReport) -> bool:
        """Whether a device says that training would pay."""
        wanted, new, drift = self.settings.new_samples, report.new_samples, report.drift
        enough = wanted is not None and isinstance(new, int) and new >= wanted
        return enough or (self.settings.drift and isinstance(drift, float) and drift >= TOLD)

    def look(self, plan: ScheduleState, now: float, ahead_s: float, telling: int, rounds_done: int) -> Look:
        """Between two rounds, or before an attempt at one: may it open?

        Args:
            plan: as it was.
            now: on the run's clock, seconds.
            ahead_s: by how much the time of day is ahead of it, see `EngineState`.
            telling: devices that say that training would pay.
            rounds_done: that have closed.
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
        """When slots of days begin, in seconds since midnight; None: rounds are counted in time spans."""
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
        if opens and self.settings.window is not None:  # a device may say so until it ends
            return Look(replace(plan, day=slot - step))
        missed = plan.missed + int(not asks or plan.due)
        return Look(replace(plan, due=False, missed=missed), again_at)

    def _used(self, plan: ScheduleState, slot: int, step: int, *, opens: bool) -> int:
        """The slot that was used last. A new plan begins with the next one, or in a window that is open."""
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
        """When the slot of a day begins, by the time of day."""
        assert self._slot_s is not None, "asked for slots of days alone"
        return instant(day, self._slot_s, self.zone)

    def _slot(self, civil: float) -> int:
        today = day_of(civil, self.zone)
        return today if civil >= self._begin(today) else today - 1

    def _closes(self, slot: int) -> float:
        """Until when a round may open in a slot: the end of the window in which it begins."""
        if self.settings.window_s is None:
            return float("inf")
        begin = self._begin(slot)
        around = (self._window(day) for day in (slot - 1, slot))
        return next((end for start, end in around if start <= begin < end), begin)

    def _opens(self, civil: float) -> float:
        """When the window that is open, or comes next, opened or opens, by the time of day."""
        if self.settings.window_s is None:
            return civil
        today = day_of(civil, self.zone)
        windows = (self._window(day) for day in (today - 1, today, today + 1, today + 2))
        return next((start for start, end in windows if end > civil), civil)

    def _window(self, day: int) -> tuple[float, float]:
        """A day's window; one that summer time skips begins when clocks have leapt, as long as it says."""
        assert self.settings.window_s is not None, "asked where there is one"
        start_s, span_s = self.settings.window_s
        last_day, last_s = divmod(start_s + span_s, DAY_S)
        start, end = instant(day, start_s, self.zone), instant(day + last_day, last_s, self.zone)
        return start, end if end > start else start + span_s
