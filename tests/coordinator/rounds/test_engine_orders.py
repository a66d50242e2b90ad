"""What must hold for the round engine whatever comes in whatever order."""

from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.coordinator.rounds.test_engine import arrived, check_kept
from tests.helpers.engine_driver import answered, handled

from fleetune.coordinator.queries.run_status import part_of
from fleetune.coordinator.rounds.actions import (
    AbandonRound,
    Admit,
    CloseFinalEvaluation,
    CloseRound,
    DropReply,
    FinishRun,
    KeepReply,
    SendTask,
    StartRound,
)
from fleetune.coordinator.rounds.engine import START_S, RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.events import Declined, DeviceGone, DeviceReady, Tick
from fleetune.coordinator.rounds.proposals.planner import Planner
from fleetune.protocols.conditions import UNKNOWN, Conditions
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.run import RunSection

NAMES = ["a", "b", "c", "d", "e"]
devices = st.sampled_from(NAMES)
numbers = st.integers(-1, 6)
runs = st.builds(
    RunSection,
    name=st.just("t"),
    seed=st.integers(0, 3),
    rounds=st.integers(1, 4),
    final_evaluation=st.booleans(),
)


def section_of(participants, quorum, **others):
    """A quorum above the participants is refused."""
    return RoundSection(participants=participants, quorum=min(quorum, participants or quorum), **others)


round_settings = st.builds(
    section_of,
    participants=st.none() | st.integers(1, 4),
    over_selection=st.sampled_from([1.0, 1.3, 2.0]),
    deadline_s=st.sampled_from([0.5, 10.0]),
    quorum=st.integers(1, 3),
    start_with=st.none() | st.integers(1, 4),
    prefer=st.sampled_from(["any", "oort", "tiers"]),
)
told = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from([0.5, 1.0, 1.0]),
        "round_s": st.sampled_from([None, None, 0.0, 1e-9, 0.3, 4.0, 50.0, 1e15]),
        "conditions": st.sampled_from([UNKNOWN, UNKNOWN, Conditions(metered=True)]),
    }
)


class Ledger:
    """Judges the engine by its actions alone: what a careful driver would have to rely on."""

    def __init__(self, run, round_settings):
        self.run, self.round_settings = run, round_settings
        self.open = None  # the StartRound that runs
        self.accepted = set()  # of the open attempt
        self.aggregated = set()  # (device, round)
        self.closed = 0
        self.admitted = set()
        self.last_turn = (0, 0)
        self.evaluated = self.over = False

    def take(self, actions):
        for action in actions:
            assert not self.over, "nothing follows FinishRun"
            getattr(self, type(action).__name__)(action)

    def Admit(self, action):
        assert self.open is None, "the method's state stands still while a round is open"
        self.admitted.add(action.report.device)

    def StartRound(self, action):
        turn = (action.round.number, action.attempt)
        participants = action.round.participants
        assert participants
        assert list(participants) == sorted(set(participants))
        assert set(participants) <= self.admitted
        assert action.round.number == self.closed + 1
        if action.resumed:
            assert (self.open.round, self.open.attempt) == (action.round, action.attempt)
            return
        assert self.open is None
        assert turn > self.last_turn
        assert not self.evaluated
        if action.round.final_evaluation:
            assert self.run.final_evaluation
            self.evaluated = True
        else:
            assert self.closed < self.run.rounds
        self.open, self.accepted, self.last_turn = action, set(), turn

    def SendTask(self, action):
        self._current(action.round, action.attempt)
        assert action.device in self.open.round.participants
        assert action.device not in self.accepted

    def KeepReply(self, action):
        self._current(action.round, action.attempt)
        assert action.device in self.open.round.participants
        assert action.device not in self.accepted
        self.accepted.add(action.device)

    def DropReply(self, action):
        assert action.rejection in {"late", "duplicate", "stale", "foreign", "unknown"}

    def CloseRound(self, action):
        self._current(action.number, action.attempt)
        assert not self.open.round.final_evaluation
        assert list(action.devices) == sorted(self.accepted)
        assert action.devices
        limit = self.round_settings.participants or len(self.open.round.participants)
        assert len(action.devices) <= limit
        pairs = {(device, action.number) for device in action.devices}
        assert not pairs & self.aggregated
        self.aggregated |= pairs
        self.closed += 1
        self.open = None

    def AbandonRound(self, action):
        self._current(action.number, action.attempt)
        limit = self.round_settings.participants or len(self.open.round.participants)
        assert len(self.accepted) < min(limit, len(self.open.round.participants))
        assert len(self.accepted) < self.round_settings.quorum
        self.open = None

    def CloseFinalEvaluation(self, action):
        self._current(action.number, action.attempt)
        assert self.open.round.final_evaluation
        assert list(action.devices) == sorted(self.accepted)
        self.open = None

    def FinishRun(self, action):
        assert self.open is None
        assert self.closed == self.run.rounds or action.reason == "every device has left"
        self.over = True

    def _current(self, number, attempt):
        assert (self.open.round.number, self.open.attempt) == (number, attempt)


def _pending(state):
    return (
        state.round_attempt,
        state.stage,
        state.timing.until,
        state.timing.gather_until,
        state.start_is_overdue,
    )


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        run=runs,
        round_=round_settings,
        now=st.sampled_from([0.0, -50.0, 1e9]),
        minimise=st.sampled_from(["none", "time"]),
    )
    def begin(self, run, round_, now, minimise):
        self.run, self.round_, self.now = run, round_, now
        self.objective = ObjectiveSection(minimise)
        self.engine = RoundEngine(run, round_, planner=Planner(self.objective))
        self.ledger = Ledger(run, round_)

    def do(self, event):
        before = self.engine.state.copy()
        frozen = msgspec.msgpack.encode(before)
        self.engine.state.take_changed()
        actions = handled(self.engine, event, self.now)
        assert msgspec.msgpack.encode(before) == frozen, "a copy is a value"
        check_kept(before, self.engine.state)
        stored = msgspec.msgpack.decode(frozen, type=EngineState)
        twin = RoundEngine(self.run, self.round_, stored, planner=Planner(self.objective))
        assert handled(twin, event, self.now) == actions, "same state and event, same actions"
        assert twin.state == self.engine.state
        self.ledger.take(actions)
        return actions

    @rule(device=devices, fields=told)
    def ready(self, device, fields):
        for action in self.do(DeviceReady(DeviceReport(device, **fields))):
            if isinstance(action, SendTask):
                assert self.engine.state.members[action.device].ready

    @rule(device=devices)
    def gone(self, device):
        self.do(DeviceGone(device))

    @rule(device=devices, number=numbers, attempt=numbers, leaving=st.booleans())
    def any_update(self, device, number, attempt, leaving):
        (verdict, *_) = self.do(arrived(self.engine, device, (number, attempt), leaving=leaving)) or [None]
        assert isinstance(verdict, KeepReply | DropReply) or self.ledger.over

    @rule(device=devices, number=numbers, attempt=numbers)
    def any_decline(self, device, number, attempt):
        self.do(Declined(device, number, attempt, ""))

    @precondition(lambda self: self.ledger.open)
    @rule(data=st.data(), leaving=st.sampled_from([False, False, False, True]))
    def due_update(self, data, leaving):
        device = data.draw(st.sampled_from(self.ledger.open.round.participants))
        self.do(arrived(self.engine, device, self.ledger.last_turn, leaving=leaving))

    @precondition(lambda self: self.ledger.open)
    @rule(data=st.data())
    def due_decline(self, data):
        device = data.draw(st.sampled_from(self.ledger.open.round.participants))
        self.do(Declined(device, *self.ledger.last_turn, "busy"))

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
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.engine.state), type=EngineState)
        self.engine = RoundEngine(self.run, self.round_, state.copy(), planner=Planner(self.objective))
        actions = answered(self.engine, self.engine.resume(now), now)
        if state.running and self.engine.state.round_attempt == state.round_attempt:
            assert self.engine.wake_at == now + state.timing.span_s, "the round is given the same time again"
        resumed = [action for action in actions if isinstance(action, StartRound) and action.resumed]
        assert bool(resumed) == (self.ledger.open is not None)
        assert not any(isinstance(action, SendTask) for action in actions)
        self.ledger.take(actions)

    @invariant()
    def a_wake_up_is_ahead_and_within_one_deadline(self):
        if self.engine.wake_at is not None:
            starts = self.engine.wake_at == self.engine.state.timing.start_by
            longest_s = START_S if starts else self.round_.deadline_s
            assert 0 < self.engine.wake_at - self.now <= longest_s + 1e-6

    @invariant()
    def an_open_round_has_a_deadline(self):
        assert self.engine.finished == self.ledger.over
        if self.ledger.open:
            assert self.engine.wake_at is not None
            span_s, whole_s = self.engine.state.timing.span_s, self.round_.deadline_s
            assert min(1.0, whole_s) <= span_s <= whole_s
            paced = self.objective.minimise == "time" and self.ledger.open.attempt == 1
            assert span_s == whole_s or (paced and not self.ledger.open.round.final_evaluation)

    @invariant()
    def the_views_agree_with_what_was_done(self):
        state = self.engine.state
        parts = Counter(part_of(state, device) for device in state.members)
        asked = Counter(part_of(state, device) for device in state.participants)
        assert parts["awaited"] == asked["awaited"]
        assert parts["replied"] == asked["replied"] == len(self.ledger.accepted if self.ledger.open else ())
        assert asked.total() == (len(self.ledger.open.round.participants) if self.ledger.open else 0)

    def _wake(self):
        """Handling a tick when it is due gets on: the open turn is over, or no longer waited for."""
        before = self.engine.state.copy()
        self.now = self.engine.wake_at
        self.do(Tick())
        after = self.engine.state
        assert _pending(after) != _pending(before)
        if before.running:
            assert after.round_attempt > before.round_attempt or after.stage == "finished"

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for name in ["f", "g", "h", "i"]:
            self.do(DeviceReady(DeviceReport(name)))
        for _ in range(200):
            if self.engine.finished:
                return
            awaited = list(self.engine.state.awaited)
            if awaited:
                self.do(arrived(self.engine, awaited[0], self.engine.state.round_attempt))
            elif self.engine.wake_at is not None:
                self._wake()
        raise AssertionError("with willing devices a run comes to its end")


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestAnyOrder = AnyOrder.TestCase


@st.composite
def arrivals(draw):
    """For each round, the order in which its participants reply."""
    return draw(st.lists(st.permutations(NAMES), min_size=4, max_size=4))


def play(run, round_, ready_order, reply_orders):
    """A run in which everybody replies, in the given orders; what was asked, admitted and closed."""
    engine = RoundEngine(run, round_)
    actions = [a for name in ready_order for a in handled(engine, DeviceReady(DeviceReport(name)), 0.0)]
    for order in reply_orders:
        turn = engine.state.round_attempt
        for name in [name for name in order if name in engine.state.participants]:
            actions += handled(engine, arrived(engine, name, turn), 0.0)
    shown = Admit | StartRound | SendTask | CloseRound | CloseFinalEvaluation | FinishRun | AbandonRound
    return [action for action in actions if isinstance(action, shown)]


@given(
    seed=st.integers(0, 5),
    participants=st.none() | st.integers(1, 5),
    ready=st.permutations(NAMES),
    replies=arrivals(),
)
def test_who_is_asked_admitted_and_aggregated_does_not_depend_on_who_was_faster(
    seed, participants, ready, replies
):
    run = RunSection(name="t", seed=seed, rounds=3)
    round_ = RoundSection(participants=participants, start_with=len(NAMES))
    played = play(run, round_, ready, replies)
    assert played == play(run, round_, NAMES, [NAMES] * 4)
    assert isinstance(played[-1], FinishRun)


@given(seed=st.integers(0, 5), quorum=st.integers(1, 3), steps=st.integers(1, 30))
def test_devices_that_always_decline_are_asked_once_a_deadline(seed, quorum, steps):
    engine = RoundEngine(
        RunSection(name="t", seed=seed), RoundSection(quorum=quorum, start_with=3, deadline_s=7.0)
    )
    now, starts = 0.0, []
    for name in ("a", "b", "c"):
        handled(engine, DeviceReady(DeviceReport(name)), now)
    for _ in range(steps):
        starts.append(now)
        while engine.state.running:
            name = next(engine.state.awaited)
            handled(engine, Declined(name, *engine.state.round_attempt, "no"), now)
        now = engine.wake_at
        handled(engine, Tick(), now)
    assert starts == [7.0 * step for step in range(steps)]
