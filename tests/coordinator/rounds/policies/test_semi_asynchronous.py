"""Semi-asynchronous rounds: each rule as a script of events, and what holds in whatever order they come."""

from collections import Counter

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.coordinator.rounds.test_engine import DEADLINE_S, Script, arrived, asked, check_kept, of
from tests.helpers.engine_driver import answered, handled

from fleetune.coordinator.queries.run_status import part_of
from fleetune.coordinator.rounds.actions import (
    AbandonRound,
    Admit,
    CloseRound,
    DropReply,
    FinishRun,
    KeepReply,
    SendTask,
    StartRound,
)
from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.events import Declined, DeviceGone, DeviceReady, Tick
from fleetune.coordinator.rounds.policies.semi_asynchronous import draw_idle
from fleetune.protocols.conditions import UNKNOWN, Conditions
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.run import RunSection
from fleetune.protocols.settings.run_toml import parse_run

WINDOW_S = 4.0


class WindowScript(Script):
    """A `Script` with the engine of the semi-asynchronous modes; updates answer the task the device has."""

    def update(self, device, turn=None, *, leaving=False):
        return super().update(device, turn or self.state.members[device].asked, leaving=leaving)

    def restart(self, now=0.0):
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=EngineState)
        assert state == self.state
        self.now = now
        self.engine = RoundEngine(self.run, self.round, state)
        return answered(self.engine, self.engine.resume(now), now)


def buffered(size, **options):
    return WindowScript(mode="buffer", buffer=size, **options)


def windowed(**options):
    return WindowScript(mode="window", window_s=WINDOW_S, **options)


def test_a_full_buffer_is_aggregated_and_leaves_the_slow_at_work():
    script = buffered(2, start_with=3)
    assert asked(script.ready("a", "b", "slow")) == ("a", "b", "slow")
    assert script.update("a") == [KeepReply("a", 1, 1)]
    assert script.update("b") == [
        KeepReply("b", 1, 1),
        CloseRound(1, 1, ("a", "b")),
        StartRound(Round(2, ("a", "b", "slow")), 1),
        SendTask("a", 2, 1),
        SendTask("b", 2, 1),
    ]
    script.update("b")
    assert script.update("slow")[:2] == [KeepReply("slow", 1, 1), CloseRound(2, 1, ("b", "slow"))]
    assert script.state.members["slow"].asked == (3, 1)
    assert script.state.members["a"].asked == (2, 1)


def test_a_window_takes_what_arrived_in_its_time():
    script = windowed(start_with=3)
    script.ready("a", "b", "slow")
    script.update("a")
    assert script.engine.wake_at == WINDOW_S
    actions = script.tick(WINDOW_S)
    assert actions[0] == CloseRound(1, 1, ("a",))
    assert asked(actions) == ("a",)
    assert script.engine.wake_at == 2 * WINDOW_S
    script.updates("slow", "b")
    assert script.update("a")[1] == CloseRound(2, 1, ("a", "b", "slow"))  # nobody is left to wait for


def test_a_window_without_its_quorum_goes_on_and_is_abandoned_after_the_deadline():
    script = windowed(start_with=2, quorum=2)
    script.ready("a", "b")
    script.update("a")
    assert script.tick(WINDOW_S) == []
    assert script.engine.wake_at == 2 * WINDOW_S  # a third window would be longer than the deadline
    actions = script.tick(2 * WINDOW_S)
    assert actions[0] == AbandonRound(1, 1, "deadline")
    assert asked(actions) == ("a", "b")
    assert script.update("b", (1, 1)) == [DropReply("b", 1, 1, "stale")]


def test_a_buffer_that_does_not_fill_is_aggregated_at_the_deadline_with_the_quorum():
    script = buffered(3, start_with=3, quorum=2)
    script.ready("a", "b", "c")
    script.update("a")
    script.update("b")
    assert script.tick(DEADLINE_S - 0.1) == []
    assert script.tick(DEADLINE_S)[0] == CloseRound(1, 1, ("a", "b"))


def test_a_freed_place_goes_at_once_to_a_device_that_has_none():
    script = buffered(3, participants=2, start_with=4)
    first = asked(script.ready("a", "b", "c", "d"))
    assert len(first) == 2
    actions = script.update(first[0])
    (third,) = asked(actions)
    assert third not in first
    resumed = of(StartRound, actions)[0]
    assert resumed == StartRound(Round(1, tuple(sorted({*first, third}))), 1, resumed=True)
    (fourth,) = asked(script.decline(first[1]))
    assert {*first, third, fourth} == {"a", "b", "c", "d"}
    script.update(third)
    assert of(CloseRound, script.update(fourth))[0].devices == tuple(sorted({first[0], third, fourth}))


def test_who_joins_an_open_window_is_admitted_and_asked_at_once():
    script = windowed()
    script.ready("b")
    assert script.ready("a") == [
        Admit(DeviceReport("a")),
        StartRound(Round(1, ("a", "b")), 1, resumed=True),
        SendTask("a", 1, 1),
    ]


def test_who_takes_too_long_starts_afresh_and_its_old_update_is_stale():
    script = buffered(1, start_with=2, max_staleness=1, rounds=9)
    script.ready("a", "slow")
    assert asked(script.update("a")) == ("a",)
    assert asked(script.update("a")) == ("a", "slow")
    assert script.state.members["slow"].asked == (3, 1)
    assert script.update("slow", (1, 1)) == [DropReply("slow", 1, 1, "late")]
    assert script.state.counters == {"expired": 1, "late": 1}


def test_an_expired_task_of_a_device_that_is_away_is_refused_as_stale():
    script = buffered(1, start_with=2, max_staleness=0)
    script.ready("a", "slow")
    script.gone("slow")
    script.update("a")
    assert script.update("slow", (1, 1)) == [DropReply("slow", 1, 1, "stale")]


@pytest.mark.parametrize("prefer", ["any", "oort", "tiers"])
def test_who_comes_back_gets_the_task_it_had_and_its_place_was_used_meanwhile(prefer):
    script = buffered(2, participants=1, start_with=5, rounds=9, prefer=prefer)
    (first,) = asked(script.ready("a", "b", "c", "d", "e"))
    (other,) = asked(script.gone(first))
    assert other != first
    assert script.ready(first) == [SendTask(first, 1, 1)]


def test_a_decliner_is_asked_again_in_the_next_window_and_not_before():
    script = buffered(1, start_with=2)
    script.ready("a", "b")
    assert asked(script.decline("a")) == ()
    assert asked(script.update("b")) == ("a", "b")


def test_when_all_decline_they_are_asked_again_when_the_window_would_have_ended():
    script = windowed(start_with=2)
    script.ready("a", "b")
    script.decline("a")
    assert script.decline("b") == [AbandonRound(1, 1, "too-few")]
    assert script.engine.wake_at == WINDOW_S
    assert asked(script.tick(WINDOW_S)) == ("a", "b")


def test_leavers_lower_the_quorum_and_the_run_ends_without_them():
    script = buffered(2, start_with=2, quorum=2, rounds=9)
    script.ready("a", "b")
    script.update("a", leaving=True)
    assert asked(script.update("b")) == ("b",)
    assert script.update("b", leaving=True)[1:] == [
        CloseRound(2, 1, ("b",)),
        FinishRun("every device has left"),
    ]


def test_the_final_evaluation_asks_everybody_whatever_they_are_at():
    script = buffered(1, start_with=2, rounds=1, final_evaluation=True)
    script.ready("a", "slow")
    assert script.update("a")[2:] == [
        StartRound(Round(2, ("a", "slow"), final_evaluation=True), 1),
        SendTask("a", 2, 1),
        SendTask("slow", 2, 1),
    ]
    assert script.engine.wake_at == DEADLINE_S
    assert script.update("slow", (1, 1)) == [DropReply("slow", 1, 1, "late")]


def test_a_restart_opens_the_window_again_and_the_slow_keep_their_task():
    script = windowed(start_with=3)
    script.ready("a", "b", "slow")
    script.update("a")
    script.tick(WINDOW_S)
    script.update("a")
    assert script.restart(now=50.0) == [StartRound(Round(2, ("a", "b", "slow")), 1, resumed=True)]
    assert script.engine.wake_at == 50.0 + WINDOW_S
    assert script.ready("a") == []
    assert script.ready("slow") == [SendTask("slow", 1, 1)]
    assert script.update("b", (1, 1)) == [KeepReply("b", 1, 1)]
    assert script.tick(50.0 + WINDOW_S)[0] == CloseRound(2, 1, ("a", "b"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"mode": "window"}, "round: window_s is missing"),
        ({"mode": "buffer"}, "round: buffer is missing"),
        ({"window_s": 3.0}, "round: window_s only goes with"),
        ({"mode": "buffer", "buffer": 2, "window_s": 3.0}, "round: window_s only goes with"),
        ({"mode": "window", "window_s": 99.0, "deadline_s": 9.0}, "round: window_s = 99 is longer"),
        ({"mode": "buffer", "buffer": 2, "over_selection": 1.5}, "round: over_selection is for"),
        ({"mode": "bufer"}, "round.mode: invalid enum value 'bufer'"),
        ({"mode": "buffer", "buffer": 2, "max_staleness": -1}, "round.max_staleness: "),
    ],
)
def test_settings_that_do_not_go_together_are_one_line(section, message):
    content = {"run": {"name": "r"}, "model": {"name": "mlp"}, "method": {"name": "fedavg"}, "round": section}
    with pytest.raises(SettingError) as caught:
        parse_run(content)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


NAMES = ["a", "b", "c", "d", "e"]
devices = st.sampled_from(NAMES)
numbers = st.integers(-1, 6)
common = {
    "participants": st.none() | st.integers(1, 4),
    "deadline_s": st.sampled_from([5.0, 10.0]),
    "quorum": st.integers(1, 3),
    "start_with": st.integers(1, 4),
    "max_staleness": st.integers(0, 3),
    "prefer": st.sampled_from(["any", "oort", "tiers"]),
}
round_settings = st.one_of(
    st.builds(RoundSection, mode=st.just("buffer"), buffer=st.integers(1, 4), **common),
    st.builds(RoundSection, mode=st.just("window"), window_s=st.sampled_from([0.5, 2.0, 5.0]), **common),
)


class Judge:
    """Judges the engine by its actions alone."""

    def __init__(self, run, round_):
        self.run, self.round = run, round_
        self.open = None  # the latest StartRound of the window
        self.tasks = {}  # by device, the turn of its open task
        self.buffer = {}  # by device, the turn of the update that counts
        self.counted = set()  # (device, turn), ever aggregated
        self.admitted = set()
        self.closed = 0
        self.evaluated = self.over = False

    def take(self, actions):
        for action in actions:
            assert not self.over, "nothing follows FinishRun"
            judge = getattr(self, type(action).__name__, None)
            if judge is not None:
                judge(action)

    def Admit(self, action):
        self.admitted.add(action.report.device)

    def StartRound(self, action):
        participants = action.round.participants
        assert list(participants) == sorted(set(participants))
        assert set(participants) <= self.admitted
        assert action.round.number == self.closed + 1
        if action.resumed:
            assert set(self.open.round.participants) <= set(participants)
        else:
            assert self.open is None
            assert not self.evaluated
        if action.round.final_evaluation and not action.resumed:
            self.evaluated, self.tasks, self.buffer = True, {}, {}
        assert action.round.final_evaluation or self.closed < self.run.rounds
        self.open = action

    def SendTask(self, action):
        turn = (action.round, action.attempt)
        assert action.device in self.open.round.participants
        assert action.device not in self.buffer
        assert turn == (self.open.round.number, self.open.attempt) or self.tasks[action.device] == turn
        assert self.open.round.number - action.round <= self.round.max_staleness
        self.tasks[action.device] = turn

    def KeepReply(self, action):
        assert self.tasks.pop(action.device) == (action.round, action.attempt)
        self.buffer[action.device] = (action.round, action.attempt)

    def CloseRound(self, action):
        assert list(action.devices) == sorted(self.buffer)
        assert action.devices
        if self.round.mode == "buffer":
            assert len(action.devices) <= max(self.round.buffer, self.round.quorum)
        updates = set(self.buffer.items())
        assert not updates & self.counted, "no update counts twice"
        assert all(action.number - turn[0] <= self.round.max_staleness for turn in self.buffer.values())
        self.counted |= updates
        self.closed += 1
        assert self.closed <= self.run.rounds
        self.open, self.buffer = None, {}

    def AbandonRound(self, action):
        assert len(self.buffer) < self.round.quorum
        self.open, self.buffer, self.tasks = None, {}, {}

    def CloseFinalEvaluation(self, action):
        assert self.open.round.final_evaluation
        assert list(action.devices) == sorted(self.buffer)
        self.open = None

    def FinishRun(self, action):
        assert self.open is None
        assert self.closed == self.run.rounds or action.reason == "every device has left"
        self.over = True


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        rounds=st.integers(1, 4),
        final_evaluation=st.booleans(),
        round_=round_settings,
        now=st.sampled_from([0.0, -50.0, 1e9]),
    )
    def begin(self, rounds, final_evaluation, round_, now):
        self.run, self.round_, self.now = (
            RunSection(name="t", rounds=rounds, final_evaluation=final_evaluation),
            round_,
            now,
        )
        self.engine = RoundEngine(self.run, round_)
        self.judge = Judge(self.run, round_)

    @property
    def state(self):
        return self.engine.state

    def do(self, event):
        before = self.state.copy()
        frozen = msgspec.msgpack.encode(before)
        self.state.take_changed()
        actions = handled(self.engine, event, self.now)
        check_kept(before, self.state)
        twin = RoundEngine(self.run, self.round_, msgspec.msgpack.decode(frozen, type=EngineState))
        assert handled(twin, event, self.now) == actions, "same state and event, same actions"
        assert twin.state == self.state
        had = dict(self.judge.tasks)
        self.judge.take(actions)
        new = [task for task in of(SendTask, actions) if had.get(task.device) != (task.round, task.attempt)]
        if new and self.state.stage == "training" and self.round_.participants:
            at_work = sum(self.state.members[device].ready for device in self.state.awaited)
            assert at_work <= self.round_.participants, "places that are free, and no more"
        return actions

    @rule(
        device=devices,
        ratio=st.sampled_from([0.5, 1.0, 1.0]),
        conditions=st.sampled_from([UNKNOWN, UNKNOWN, Conditions(metered=True)]),
    )
    def ready(self, device, ratio, conditions):
        self.do(DeviceReady(DeviceReport(device, ratio=ratio, conditions=conditions)))

    @rule(device=devices)
    def gone(self, device):
        self.do(DeviceGone(device))

    @rule(device=devices, number=numbers, attempt=numbers, leaving=st.booleans())
    def any_update(self, device, number, attempt, leaving):
        (verdict, *_) = self.do(arrived(self.engine, device, (number, attempt), leaving=leaving)) or [None]
        assert isinstance(verdict, KeepReply | DropReply) or self.judge.over

    @precondition(lambda self: self.judge.tasks)
    @rule(data=st.data(), leaving=st.sampled_from([False, False, False, True]))
    def due_update(self, data, leaving):
        device = data.draw(st.sampled_from(sorted(self.judge.tasks)))
        self.do(arrived(self.engine, device, self.state.members[device].asked, leaving=leaving))

    @precondition(lambda self: self.judge.tasks)
    @rule(data=st.data())
    def due_decline(self, data):
        device = data.draw(st.sampled_from(sorted(self.judge.tasks)))
        self.do(Declined(device, *self.state.members[device].asked, "busy"))

    @rule(device=devices, number=numbers, attempt=numbers)
    def any_decline(self, device, number, attempt):
        self.do(Declined(device, number, attempt, ""))

    @rule(step_s=st.sampled_from([0.0, 0.1, 3.0, 20.0, 1e8]))
    def time_passes(self, step_s):
        self.now += step_s
        self.do(Tick())

    @rule()
    def wake(self):
        if self.engine.wake_at is not None:
            self._wake()

    @rule(now=st.sampled_from([0.0, 5.0, -1e6, 1e9]))
    def restart(self, now):
        self.now = now
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=EngineState)
        self.engine = RoundEngine(self.run, self.round_, state.copy())
        actions = self.engine.resume(now)
        actions = answered(self.engine, actions, now)
        if self.judge.open is not None:
            assert actions[0] == StartRound(self.judge.open.round, self.judge.open.attempt, resumed=True)
        self.judge.take(actions)

    @invariant()
    def a_wake_up_is_ahead_and_within_one_deadline(self):
        if self.engine.wake_at is not None:
            assert 0 < self.engine.wake_at - self.now <= self.round_.deadline_s + 1e-6

    @invariant()
    def an_open_window_ends_in_time_and_leaves_nobody_idle_that_has_a_place(self):
        assert self.engine.finished == self.judge.over
        if self.judge.open:
            assert self.engine.wake_at is not None
        if self.state.stage == "training":
            assert not draw_idle(self.state, self.round_, self.run.seed)

    @invariant()
    def the_views_agree_with_what_was_done(self):
        parts = Counter(part_of(self.state, device) for device in self.state.members)
        asked = Counter(part_of(self.state, device) for device in self.state.participants)
        assert parts["awaited"] == asked["awaited"]
        assert parts["replied"] == asked["replied"] == (len(self.judge.buffer) if self.judge.open else 0)

    def _wake(self):
        """Handling a tick when it is due gets on."""
        before = self.state.copy()
        self.now = self.engine.wake_at
        self.do(Tick())
        after = self.state
        assert (after.round_attempt, after.stage, after.timing.until, after.timing.gather_until) != (
            before.round_attempt,
            before.stage,
            before.timing.until,
            before.timing.gather_until,
        )
        assert self.engine.wake_at is None or self.engine.wake_at > self.now

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for name in ["f", "g", "h", "i"]:
            self.do(DeviceReady(DeviceReport(name)))
        for _ in range(200):
            if self.engine.finished:
                return
            awaited = list(self.state.awaited)
            if awaited:
                self.do(arrived(self.engine, awaited[0], self.state.members[awaited[0]].asked))
            elif self.engine.wake_at is not None:
                self._wake()
        raise AssertionError("with willing devices a run comes to its end")


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase
