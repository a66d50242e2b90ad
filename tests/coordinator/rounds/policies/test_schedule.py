"""When rounds open: years of schedules on a virtual clock, clocks that are set, restarts, summer time."""

from collections import Counter
from datetime import date, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.engine_driver import answered, handled
from tests.helpers.errors import raises

from fleetune.coordinator.queries.waiting import schedule_reason
from fleetune.coordinator.rounds.actions import CloseRound, FinishRun, SendTask, StartRound
from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.events import (
    ClockSet,
    DeviceGone,
    DeviceReady,
    Paused,
    ReplyArrived,
    RoundsEnded,
    Tick,
)
from fleetune.coordinator.rounds.rejections import rejection_of
from fleetune.coordinator.run.run_clock import schedule_of
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.run import RunSection
from fleetune.protocols.settings.schedule import DAY_S, ScheduleSection

BERLIN = "Europe/Berlin"
HOUR_S = 3600
NIGHTLY = {"every": "24h", "window": "02:00-05:00"}


def at(text, zone="UTC"):
    """Seconds since 1970 of a local date and time."""
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp()


class Nights:
    """An engine with a device that is there and replies at once; `opened`: times of day of its rounds."""

    def __init__(self, start, *, rounds="open", replies=True, **schedule):
        zone = schedule.setdefault("zone", "UTC")
        self.schedule = schedule_of(ScheduleSection(**schedule))
        self.run = RunSection("test", rounds=rounds, final_evaluation=False)
        self.round = RoundSection(start_with=1)
        self.engine = RoundEngine(self.run, self.round, schedule=self.schedule)
        self.zone, self.replies = ZoneInfo(zone), replies
        self.now, self.opened, self.actions = start, [], []
        self.say(DeviceReport("a"))

    @property
    def state(self):
        return self.engine.state

    @property
    def civil(self):
        return datetime.fromtimestamp(self.now + self.state.timing.ahead_s, self.zone)

    @property
    def nights(self):
        return [f"{one:%m-%d %H:%M}" for one in self.opened]

    def say(self, report):
        self.do(DeviceReady(report))

    def do(self, event):
        self.take(handled(self.engine, event, self.now))

    def take(self, actions):
        self.actions += actions
        for action in actions:
            if isinstance(action, StartRound) and not action.resumed:
                self.opened.append(self.civil)
                if self.replies:
                    self.do(ReplyArrived("a", *self.state.round_attempt, None))

    def until(self, end, *, restart=lambda: False):
        """Sleep from one time that the engine asks for to the next."""
        while (wake_at := self.engine.wake_at) is not None and wake_at <= end:
            self.now = max(self.now, wake_at)
            self.do(Tick())
            if restart():
                self.restart()
        self.now = max(self.now, end)
        self.do(Tick())

    def restart(self, off_s=0.0):
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=EngineState)
        self.now += off_s
        self.engine = RoundEngine(self.run, self.round, state, self.schedule)
        actions = answered(self.engine, self.engine.resume(self.now), self.now)
        self.take(actions)
        self.say(DeviceReport("a"))

    def set_clock(self, by_s):
        self.do(ClockSet(self.state.timing.ahead_s + by_s))


def test_back_to_back_is_as_ever_and_needs_no_clock():
    nights = Nights(0.0, rounds=5)
    assert len(nights.opened) == 5
    assert isinstance(nights.actions[-1], FinishRun)
    assert nights.engine.wake_at is None


def test_years_of_nights_open_once_a_day_at_their_time_also_when_clocks_change():
    nights = Nights(at("2026-01-01 12:00", BERLIN), every="24h", window="02:30-05:00", zone=BERLIN)
    nights.until(at("2030-01-01 12:00", BERLIN))
    days = [one.date() for one in nights.opened]
    first = date(2026, 1, 2)
    assert days == [first + timedelta(days=n) for n in range((date(2030, 1, 1) - first).days + 1)]
    times = Counter(f"{one:%H:%M}" for one in nights.opened)
    assert times == {"02:30": len(days) - 4, "03:30": 4}, "an hour that is skipped is taken later"
    twice = [one for one in nights.opened if one.date() == date(2026, 10, 25)]
    assert [one.fold for one in twice] == [0], "of an hour that comes twice it is the first"


@pytest.mark.parametrize(
    ("schedule", "opened"),
    [
        ({"every": "2d", "window": "02:00-05:00"}, ["01-02 02:00", "01-04 02:00", "01-06 02:00"]),
        ({"every": "36h"}, ["01-01 12:00", "01-03 00:00", "01-04 12:00", "01-06 00:00", "01-07 12:00"]),
        ({"every": "1w", "window": "01:00-05:00"}, ["01-02 01:00"]),
        ({"every": "1d", "window": "23:59-00:00"}, [f"01-0{day} 23:59" for day in range(1, 8)]),
        (
            {"every": "2h", "window": "22:00-02:00"},
            ["01-01 22:00", "01-02 00:00", "01-02 22:00", "01-03 00:00", "01-03 22:00"],
        ),
        (
            {"every": "12h", "window": "20:00-06:00"},
            [f"01-0{day} {hour}" for day in range(1, 8) for hour in ("20:00",)],
        ),
    ],
)
def test_spans_and_times_of_day_together(schedule, opened):
    nights = Nights(at("2026-01-01 12:00"), **schedule)
    nights.until(at("2026-01-08 12:00") - 1)
    found = nights.nights
    assert found[: len(opened)] == opened[: len(found)]
    assert len(found) >= len(opened)


def test_inside_a_window_alone_rounds_follow_each_other():
    nights = Nights(at("2026-01-01 12:00"), window="01:00-05:00", replies=False)
    assert nights.opened == []
    nights.until(at("2026-01-02 01:00"))
    for minute in range(10, 250, 10):
        nights.now = at("2026-01-02 01:00") + 60 * minute
        nights.do(ReplyArrived("a", *nights.state.round_attempt, None))
    assert len(nights.opened) == 24, "the last one is finished, and no other opens"
    assert max(nights.nights) == "01-02 04:50"
    assert not nights.state.running
    nights.until(at("2026-01-03 01:00"))
    assert nights.nights[-1] == "01-03 01:00"


@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
@pytest.mark.parametrize(
    "window", ["02:00-03:00", "01:30-02:30", "02:15-02:45", "02:30-04:00", "22:00-02:30"]
)
def test_no_change_of_clocks_skips_a_window_or_opens_it_twice(day, window):
    noon = at(f"{day} 12:00", BERLIN)
    nights = Nights(noon - 2 * DAY_S, every="24h", window=window, zone=BERLIN)
    nights.until(noon + 2 * DAY_S)
    assert len(nights.opened) == 4
    assert len({one.date() for one in nights.opened}) == 4


def test_a_coordinator_that_was_down_catches_up_in_the_window_and_the_next_night_is_on_time():
    nights = Nights(at("2026-01-01 12:00"), **NIGHTLY)
    nights.restart(off_s=2 * DAY_S + 6 * HOUR_S)  # until the 3rd, 18:00
    assert nights.opened == []
    nights.restart(off_s=10.5 * HOUR_S)
    assert nights.nights == ["01-04 04:30"]
    nights.until(at("2026-01-06 12:00"))
    assert nights.nights[1:] == ["01-05 02:00", "01-06 02:00"]


@pytest.mark.parametrize("back_h", [1, 5, 12, 20])
def test_a_clock_that_is_set_back_makes_no_second_round_of_a_night(back_h):
    nights = Nights(at("2026-01-01 12:00"), **NIGHTLY)
    nights.until(at("2026-01-02 03:00"))
    nights.set_clock(-back_h * HOUR_S)
    nights.until(nights.now + 4 * DAY_S)
    assert len({one.date() for one in nights.opened}) == len(nights.opened)
    assert nights.nights[:3] == ["01-02 02:00", "01-03 02:00", "01-04 02:00"]


def test_a_clock_that_was_years_ahead_and_is_set_right_loses_no_night():
    nights = Nights(at("2026-01-01 12:00"), **NIGHTLY)
    nights.set_clock(400 * DAY_S)  # a board without a clock, before it has asked for the time
    nights.until(nights.now + HOUR_S)
    nights.set_clock(-400 * DAY_S)
    nights.until(at("2026-01-04 12:00"))
    assert nights.nights == ["01-02 02:00", "01-03 02:00", "01-04 02:00"]


def test_devices_are_asked_as_long_as_the_window_is_open():
    nights = Nights(at("2026-01-01 12:00"), **NIGHTLY, drift=True)
    nights.until(at("2026-01-02 03:00"))
    assert nights.opened == []
    nights.say(DeviceReport("a", drift=2.0))
    nights.until(at("2026-01-03 12:00"))
    assert nights.nights == ["01-02 03:00"]


def test_a_window_that_is_over_gives_up_what_never_had_its_devices():
    nights = Nights(at("2026-01-01 12:00"), **NIGHTLY, replies=False)
    nights.until(at("2026-01-02 04:59"))
    attempts = len(nights.opened)
    assert attempts > 10, "an attempt that missed its quorum is asked again"
    nights.until(at("2026-01-02 23:00"))
    assert len(nights.opened) <= attempts + 1
    assert not nights.state.running
    nights.until(at("2026-01-03 02:00"))
    assert nights.nights[-1] == "01-03 02:00"


def test_a_board_that_thought_it_was_1970_has_its_first_night_at_the_right_time():
    nights = Nights(5.0, **NIGHTLY)
    nights.set_clock(at("2026-01-01 12:00") - 5.0)
    nights.until(nights.now + 2 * DAY_S)
    assert nights.nights[-2:] == ["01-02 02:00", "01-03 02:00"]


def test_a_span_takes_no_notice_of_clocks_that_are_set():
    nights = Nights(at("2026-01-01 12:00"), every="6h")
    for by_s in (HOUR_S, -9 * HOUR_S, 3 * DAY_S):
        nights.set_clock(by_s)
        nights.until(nights.now + 6 * HOUR_S)
    assert len(nights.opened) == 4


clocks = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 3 * DAY_S)),
        st.tuples(st.just("off"), st.integers(0, 3 * DAY_S)),
        st.tuples(st.just("set"), st.integers(-12 * HOUR_S, 12 * HOUR_S)),
        st.tuples(st.just("pause"), st.booleans()),
    ),
    max_size=12,
)
schedules = st.sampled_from(
    [
        {"every": "24h", "window": "02:30-05:00"},
        {"every": "24h", "window": "23:00-03:00"},
        {"every": "3d", "window": "12:00-13:00"},
    ]
)


@settings(max_examples=150, deadline=None)
@given(story=clocks, schedule=schedules, start=st.integers(0, 400 * DAY_S))
def test_whatever_happens_to_clocks_and_coordinator_rounds_keep_their_distance(story, schedule, start):
    nights = Nights(at("2026-01-01 00:00") + start, zone=BERLIN, **schedule)
    due = []
    for what, value in story:
        before = len(nights.opened)
        if what == "wait":
            nights.until(nights.now + value, restart=lambda: True)
        elif what == "off":
            nights.restart(off_s=value)
        elif what == "set":
            nights.set_clock(value)
        else:
            nights.do(Paused(value))
        due += [nights.state.plan.since] * (len(nights.opened) > before)
    assert all(later - earlier >= 23 * HOUR_S for earlier, later in pairwise(due))
    nights.do(Paused(False))
    begun, count = nights.now, len(nights.opened)
    nights.until(begun + 10 * DAY_S)
    assert len(nights.opened) >= count + 2, "and it goes on"


@settings(max_examples=60, deadline=None)
@given(schedule=schedules, start=st.integers(0, 400 * DAY_S))
def test_a_restart_at_every_event_changes_nothing(schedule, start):
    begin = at("2026-01-01 00:00") + start
    plain, restarted = (Nights(begin, zone=BERLIN, **schedule) for _ in range(2))
    plain.until(begin + 20 * DAY_S)
    restarted.until(begin + 20 * DAY_S, restart=lambda: True)
    assert restarted.nights == plain.nights


def test_devices_say_when_training_pays_and_their_update_uses_it_up():
    nights = Nights(0.0, new_samples=100, devices=2)
    nights.say(DeviceReport("a", new_samples=99))
    nights.say(DeviceReport("b", new_samples=100))
    assert nights.opened == []
    assert schedule_reason(nights.state, nights.schedule, nights.now) == (
        "due when 2 devices have 100 new samples: 1 so far"
    )
    nights.say(DeviceReport("a", new_samples=100))
    assert len(nights.opened) == 1
    nights.do(ReplyArrived("b", *nights.state.round_attempt, None))
    assert len(nights.opened) == 1, "their reports are older than their updates"
    nights.do(ClockSet(5.0))
    for device in "ab":
        nights.say(DeviceReport(device, new_samples=0))
    assert len(nights.opened) == 1
    for device in "ab":
        nights.say(DeviceReport(device, new_samples=200))
    assert len(nights.opened) == 2


def test_drift_alone_or_beside_samples_is_enough():
    both = {"new_samples": 100, "drift": True}
    for schedule, report, opens in [
        (both, {"drift": 1.0}, True),
        (both, {"drift": 0.9, "new_samples": 5}, False),
        (both, {"drift": 0.0, "new_samples": 100}, True),
        ({"drift": True}, {"new_samples": 1000}, False),
        ({"new_samples": 10}, {"drift": 5.0}, False),
        (both, {}, False),
    ]:
        nights = Nights(0.0, **schedule)
        nights.say(DeviceReport("a", **report))
        assert bool(nights.opened) == opens, (schedule, report)


def test_a_device_that_sleeps_has_said_what_it_has():
    nights = Nights(at("2026-01-01 12:00"), **NIGHTLY, new_samples=10)
    nights.say(DeviceReport("a", new_samples=10))
    nights.do(DeviceGone("a"))
    nights.until(at("2026-01-02 02:30"))
    assert nights.opened == []
    assert nights.state.plan.due
    assert schedule_reason(nights.state, nights.schedule, nights.now) == "", "only devices are missing"
    nights.say(DeviceReport("a", new_samples=10))
    assert nights.nights == ["01-02 02:30"]


def test_paused_the_open_round_is_finished_and_none_opens_until_it_goes_on_after_a_restart_too():
    nights = Nights(0.0, every="1h", replies=False)
    nights.do(Paused(True))
    assert nights.state.running
    nights.do(ReplyArrived("a", *nights.state.round_attempt, None))
    assert any(isinstance(action, CloseRound) for action in nights.actions)
    nights.until(5 * HOUR_S)
    nights.restart(off_s=HOUR_S)
    assert len(nights.opened) == 1
    assert nights.engine.wake_at is None or nights.engine.wake_at <= nights.now + 60
    assert "paused" in schedule_reason(nights.state, nights.schedule, nights.now)
    nights.do(Paused(False))
    assert len(nights.opened) == 2


def test_an_open_run_nobody_leaves_and_it_ends_when_it_is_told():
    nights = Nights(0.0, every="1h", replies=False)
    nights.do(ReplyArrived("a", *nights.state.round_attempt, None, leaving=True))
    assert not nights.state.members["a"].left
    nights.do(RoundsEnded("enough"))
    assert nights.actions[-1] == FinishRun("enough")


def test_who_had_left_a_run_is_back_when_its_rounds_are_made_open():
    nights = Nights(0.0, rounds=9, replies=False)
    nights.do(ReplyArrived("a", *nights.state.round_attempt, None, leaving=True))
    assert nights.engine.finished
    nights.engine.reopen()
    nights.run = replace(nights.run, rounds="open")
    nights.restart(off_s=2 * HOUR_S)
    assert len(nights.opened) == 2


def test_a_pause_gives_up_what_slower_devices_are_at_and_asks_them_afresh_after_it():
    round_ = RoundSection(mode="buffer", buffer=1, deadline_s=100.0)
    engine = RoundEngine(RunSection("test", rounds="open"), round_)
    for device in "ab":
        handled(engine, DeviceReady(DeviceReport(device)), 0.0)
    slow = engine.state.members["b"].asked
    handled(engine, Paused(True), 1.0)
    handled(engine, ReplyArrived("a", *engine.state.round_attempt, None), 2.0)
    assert (engine.state.stage, engine.state.participants) == ("waiting", ())
    assert rejection_of(engine.state, "b", slow) == "late"
    actions = handled(engine, Paused(False), 3.0)
    assert [one.device for one in actions if isinstance(one, SendTask)] == ["a", "b"]
    assert engine.state.members["b"].asked > slow


def test_when_it_is_due_is_said_for_people():
    nights = Nights(at("2026-03-28 12:00", BERLIN), every="24h", window="02:30-05:00", zone=BERLIN)
    said = schedule_reason(nights.state, nights.schedule, nights.now)
    assert said == "due 2026-03-29 03:30, in 14 h 30 min"
    assert schedule_reason(nights.state, nights.schedule, nights.now, countdown=False) == (
        "due 2026-03-29 03:30"
    )


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"every": "soon"}, ('every = "soon"',)),
        ({"every": "0h"}, ('every = "0h"',)),
        ({"window": "01:00"}, ('window = "01:00"',)),
        ({"window": "01:00-25:00"}, ('window = "01:00-25:00"',)),
        ({"devices": 2}, ("devices", "new_samples", "drift")),
        ({"zone": "Berlin"}, ('zone = "Berlin"',)),
        ({"zone": "../../etc/passwd"}, ("zone",)),
    ],
)
def test_a_mistake_in_a_schedule_is_named_by_its_key(keys, named):
    with raises(ValueError, *named):
        ScheduleSection(**keys)


def test_first_rounds_that_are_done_do_not_hide_when_the_next_one_is_due():
    nights = Nights(0.0, every="14s", first_rounds=2)
    assert nights.state.rounds_done == 2
    assert schedule_reason(nights.state, nights.schedule, nights.now).endswith("in 14 s")
