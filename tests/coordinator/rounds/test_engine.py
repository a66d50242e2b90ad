"""Each rule of the round engine, as a small script of events."""

import msgspec
import pytest
from tests.helpers.engine_driver import answered, handled

from fleetune.coordinator.queries.run_status import StatusReader, part_of
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
from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState, RoundAttempt
from fleetune.coordinator.rounds.events import Declined, DeviceGone, DeviceReady, ReplyArrived, Tick
from fleetune.coordinator.rounds.policies.selection import START_S
from fleetune.coordinator.rounds.proposals.planner import Planner
from fleetune.coordinator.rounds.records import Ledger
from fleetune.coordinator.rounds.rejections import rejection_of
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import Round
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.run import RunSection
from fleetune.protocols.settings.run_toml import parse_run

DEADLINE_S = 10.0


def arrived(engine, device, turn, **said):
    """The event of a reply, judged as it comes in."""
    return ReplyArrived(device, *turn, rejection_of(engine.state, device, RoundAttempt(*turn)), **said)


NONE = ObjectiveSection()


class Script:
    """An engine with a clock that the test moves; every call returns the engine's actions."""

    def __init__(self, *, rounds=3, final_evaluation=False, seed=0, objective=NONE, **round_settings):
        self.run = RunSection(name="test", seed=seed, rounds=rounds, final_evaluation=final_evaluation)
        self.round = RoundSection(**{"deadline_s": DEADLINE_S, "start_with": 1, **round_settings})
        self.objective = objective
        self.engine = RoundEngine(self.run, self.round, planner=Planner(objective))
        self.now = 0.0

    @property
    def state(self):
        return self.engine.state

    def do(self, event):
        return handled(self.engine, event, self.now)

    def ready(self, *devices, **fields):
        return [a for d in devices for a in self.do(DeviceReady(DeviceReport(d, **fields)))]

    def gone(self, device):
        return self.do(DeviceGone(device))

    def update(self, device, turn=None, **said):
        return self.do(arrived(self.engine, device, turn or self.state.round_attempt, **said))

    def updates(self, *devices, **said):
        return [a for d in devices for a in self.update(d, **said)]

    def decline(self, device, turn=None, reason="too hot"):
        return self.do(Declined(device, *(turn or self.state.round_attempt), reason))

    def tick(self, now):
        self.now = now
        return self.do(Tick())

    def restart(self, now=0.0, **round_settings):
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.state), type=EngineState)
        assert state == self.state
        self.now = now
        changed = msgspec.structs.replace(self.round, **round_settings)
        self.engine = RoundEngine(self.run, changed, state, planner=Planner(self.objective))
        return answered(self.engine, self.engine.resume(now), now)


def of(kind, actions):
    return [action for action in actions if isinstance(action, kind)]


def asked(actions):
    return tuple(task.device for task in of(SendTask, actions))


def groups_of(state):
    """As they are, and as they are told in order."""
    groups = state.groups
    assert groups.eligible_ascending == tuple(sorted(groups.eligible))
    return {name: found for name, found in vars(groups).items() if not name.startswith("_")}


def check_kept(before: EngineState, state: EngineState) -> None:
    """What the state keeps so that an event costs what it changed agrees with what can be looked up."""
    fresh = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=EngineState)
    assert groups_of(state) == groups_of(fresh), "groups are those of the members"
    changed = {name for name, member in state.members.items() if before.members.get(name) != member}
    assert changed <= state.take_changed(), "a driver that writes the changed rows writes all"


def test_a_whole_run_in_the_order_of_its_actions():
    script = Script(rounds=2, final_evaluation=True, start_with=2)
    assert script.ready("b") == []
    assert script.ready("a") == [
        Admit(DeviceReport("a")),
        Admit(DeviceReport("b")),
        StartRound(Round(1, ("a", "b")), 1),
        SendTask("a", 1, 1),
        SendTask("b", 1, 1),
    ]
    assert script.update("b") == [KeepReply("b", 1, 1)]
    assert script.update("a") == [
        KeepReply("a", 1, 1),
        CloseRound(1, 1, ("a", "b")),
        StartRound(Round(2, ("a", "b")), 1),
        SendTask("a", 2, 1),
        SendTask("b", 2, 1),
    ]
    script.update("a")
    assert script.update("b")[1:] == [
        CloseRound(2, 1, ("a", "b")),
        StartRound(Round(3, ("a", "b"), final_evaluation=True), 1),
        SendTask("a", 3, 1),
        SendTask("b", 3, 1),
    ]
    script.update("b")
    assert script.update("a") == [
        KeepReply("a", 3, 1),
        CloseFinalEvaluation(3, 1, ("a", "b")),
        FinishRun("all rounds are done"),
    ]
    assert script.engine.finished
    assert script.engine.wake_at is None
    assert script.ready("c") == script.update("a") == script.decline("b") == script.tick(1e9) == []
    assert script.state.counters == {"late": 2}


def test_start_with_counts_those_who_are_there_now_and_only_before_round_one():
    script = Script(start_with=3)
    script.ready("a", "b")
    script.gone("a")
    assert script.ready("c") == []
    assert asked(script.ready("a")) == ("a", "b", "c")
    script.gone("b")
    script.gone("c")
    script.update("a")
    assert asked(script.tick(DEADLINE_S)) == ("a",)


@pytest.mark.parametrize(("settings", "wanted"), [({}, 2), ({"participants": 3}, 3), ({"quorum": 4}, 4)])
def test_round_one_opens_with_the_usual_number_of_devices(settings, wanted):
    script, names = Script(start_with=None, **settings), "abcd"[:wanted]
    assert script.ready(*names[:-1]) == []
    assert script.state.timing.start_by == START_S
    assert asked(script.ready(names[-1])) == tuple(names)


def test_round_one_opens_with_those_there_when_others_do_not_come():
    script = Script(start_with=None, participants=3)
    script.now = 5.0
    assert script.ready("a") == []
    assert script.engine.wake_at == 5.0 + START_S
    script.now = 6.0
    script.gone("a")
    assert script.engine.wake_at is None
    script.now = 30.0
    assert script.ready("b") == []
    assert script.tick(29.0 + START_S) == []
    assert asked(script.tick(30.0 + START_S)) == ("b",)
    assert script.engine.wake_at == script.state.timing.until


def test_round_one_still_waits_for_its_quorum_after_that_and_does_not_wake_for_nothing():
    script = Script(start_with=None, participants=4, quorum=2)
    script.ready("a")
    assert script.tick(START_S) == []
    assert script.engine.wake_at is None
    assert asked(script.ready("b")) == ("a", "b")


def test_a_restart_before_round_one_gives_devices_time_again():
    script = Script(start_with=None)
    script.ready("a")
    script.restart(50.0)
    assert script.ready("a") == []
    assert asked(script.tick(50.0 + START_S)) == ("a",)


def test_start_with_one_in_the_settings_does_not_wait():
    assert asked(Script(start_with=1).ready("a")) == ("a",)


def test_a_round_waits_for_its_quorum_without_asking_to_be_woken():
    script = Script(quorum=2)
    assert script.ready("a") == []
    assert script.engine.wake_at is None
    assert asked(script.ready("b")) == ("a", "b")


def test_the_draw_depends_on_the_ready_devices_and_the_turn_alone():
    names = [f"d{i}" for i in range(20)]
    draws = []
    for order in (names, names[::-1]):
        script = Script(rounds=5, participants=4, start_with=20)
        chosen = [asked(script.ready(*order))]
        while not script.engine.finished:
            chosen.append(asked(script.updates(*chosen[-1])))
        draws.append(chosen[:-1])
    assert draws[0] == draws[1]
    assert all(list(chosen) == sorted(chosen) and len(set(chosen)) == 4 for chosen in draws[0])
    assert len(set(draws[0])) > 1
    other = Script(rounds=5, participants=4, start_with=20, seed=1)
    assert asked(other.ready(*names)) != draws[0][0]


@pytest.mark.parametrize(
    ("participants", "over_selection", "fleet", "expected"),
    [
        (10, 1.3, 20, 13),
        (100, 1.1, 120, 110),
        (3, 1.5, 20, 5),
        (10, 1.3, 12, 12),
        (10, 1.0, 4, 4),
        (None, 2.0, 7, 7),
    ],
)
def test_over_selection_asks_the_ceiling_and_never_more_than_there_are(
    participants, over_selection, fleet, expected
):
    script = Script(participants=participants, over_selection=over_selection, start_with=fleet)
    assert len(asked(script.ready(*(f"d{i:03}" for i in range(fleet))))) == expected


def test_an_over_selected_round_closes_with_the_first_k_and_the_rest_is_late():
    script = Script(participants=2, over_selection=2.0, start_with=4)
    script.ready("a", "b", "c", "d")
    script.update("d")
    assert script.update("b")[1] == CloseRound(1, 1, ("b", "d"))
    assert script.update("a", (1, 1)) == [DropReply("a", 1, 1, "late")]
    assert script.state.counters["late"] == 1


def test_a_round_closes_when_all_have_answered_with_at_least_the_quorum():
    script = Script(quorum=2, start_with=3)
    script.ready("a", "b", "c")
    script.update("c")
    assert script.decline("a") == []
    assert script.update("b")[1] == CloseRound(1, 1, ("b", "c"))
    assert script.state.counters == {"declined": 1}


def test_a_round_closes_at_the_deadline_with_the_quorum_and_not_before():
    script = Script(quorum=2, start_with=3)
    script.ready("a", "b", "c")
    script.updates("a", "c")
    assert script.engine.wake_at == DEADLINE_S
    assert script.tick(DEADLINE_S - 0.001) == []
    assert script.tick(DEADLINE_S)[0] == CloseRound(1, 1, ("a", "c"))


def test_a_missed_quorum_asks_the_same_number_again_with_a_new_draw():
    names = [f"d{i}" for i in range(20)]
    script = Script(participants=5, quorum=2, start_with=20)
    first = asked(script.ready(*names))
    script.update(first[0])
    actions = script.tick(DEADLINE_S)
    second = asked(actions)
    assert actions[:2] == [AbandonRound(1, 1, "deadline"), StartRound(Round(1, second), 2)]
    assert second != first
    assert script.state.counters == {"abandoned": 1}
    closing = script.updates(*second)[5:]
    assert closing[0] == CloseRound(1, 2, second)
    assert closing[1].attempt == 1


def test_when_all_decline_at_once_the_next_attempt_waits_for_the_deadline():
    script = Script(start_with=2)
    script.ready("a", "b")
    script.decline("a")
    for attempt in (1, 2, 3):
        script.now += 1.0
        if attempt > 1:
            script.decline("a")
        assert script.decline("b") == [AbandonRound(1, attempt, "too-few")]
        assert script.engine.wake_at == attempt * DEADLINE_S
        script.gone("a")
        assert script.ready("a") == []  # coming back is no new offer
        assert script.tick(attempt * DEADLINE_S - 0.5) == []
        assert asked(script.tick(attempt * DEADLINE_S)) == ("a", "b")


def test_who_declined_a_round_is_not_drawn_for_it_again_but_for_the_next():
    script = Script(start_with=3, quorum=2)
    script.ready("a", "b", "c")
    script.decline("b")
    assert asked(script.tick(DEADLINE_S)) == ("a", "c")
    assert asked(script.updates("a", "c")) == ("a", "b", "c")


def test_others_take_over_at_once_when_too_few_answer():
    script = Script(participants=1, start_with=2)
    (chosen,) = asked(script.ready("a", "b"))
    (other,) = {"a", "b"} - {chosen}
    actions = script.decline(chosen)
    assert actions[0] == AbandonRound(1, 1, "too-few")
    assert asked(actions) == (other,)
    assert script.decline(other) == [AbandonRound(1, 2, "too-few")]
    assert asked(script.ready("new")) == ("new",)


def test_a_participant_that_comes_back_gets_its_task_again_until_it_replied():
    script = Script(start_with=2)
    script.ready("a", "b")
    assert script.gone("a") == []
    assert script.ready("a") == [SendTask("a", 1, 1)]
    assert script.update("a") == [KeepReply("a", 1, 1)]
    script.gone("a")
    assert script.ready("a") == []
    assert script.state.counters == {"gone": 2}


def test_an_update_of_a_device_that_just_went_counts():
    script = Script(start_with=2, quorum=2)
    script.ready("a", "b")
    script.gone("a")
    assert script.update("a") == [KeepReply("a", 1, 1)]
    assert script.update("b")[1] == CloseRound(1, 1, ("a", "b"))


def test_replies_that_do_not_count_are_dropped_with_their_objection_and_counted():
    script = Script(participants=2, start_with=3, quorum=2)
    pair = asked(script.ready("a", "b", "c"))
    (spare,) = {"a", "b", "c"} - set(pair)

    def rejection(device, turn):
        (dropped,) = script.update(device, turn)
        assert dropped == DropReply(device, *turn, dropped.rejection)
        return dropped.rejection

    assert rejection(spare, (1, 1)) == "foreign"
    assert rejection("nobody", (1, 1)) == "foreign"
    assert Script().update("a", (1, 1)) == [DropReply("a", 1, 1, "unknown")]
    assert rejection(pair[0], (2, 1)) == "unknown"
    assert rejection(pair[0], (1, 2)) == "unknown"
    assert rejection(pair[0], (0, 0)) == "unknown"
    assert rejection(pair[0], (-3, 7)) == "unknown"
    script.update(pair[0])
    assert rejection(pair[0], (1, 1)) == "duplicate"
    script.tick(DEADLINE_S)
    assert rejection(pair[1], (1, 1)) == "stale"
    script.updates(*asked_now(script))
    assert rejection(pair[1], (1, 1)) == "late"
    assert script.state.counters == {
        "foreign": 2, "unknown": 4, "duplicate": 1, "abandoned": 1, "stale": 1, "late": 1
    }  # fmt: skip


def asked_now(script):
    return script.state.participants


def test_a_reply_taken_before_its_round_closed_is_a_duplicate_afterwards():
    script = Script(rounds=20, participants=1, start_with=2)
    (first,) = asked(script.ready("a", "b"))
    while asked(script.updates(*asked_now(script))) == (first,):
        pass
    done = script.state.members[first].asked
    assert script.update(first, done) == [DropReply(first, *done, "duplicate")]


def test_wrong_declines_are_counted_and_change_nothing():
    script = Script(start_with=2)
    script.ready("a", "b")
    script.update("a")
    for device, turn in [("a", (1, 1)), ("b", (1, 2)), ("nobody", (1, 1))]:
        assert script.decline(device, turn) == []
    assert script.state.counters == {"duplicate": 1, "unknown": 1, "foreign": 1}
    assert script.update("b")[1] == CloseRound(1, 1, ("a", "b"))


def test_an_update_after_a_decline_does_not_count():
    script = Script(start_with=2)
    script.ready("a", "b")
    script.decline("a")
    assert script.update("a") == [DropReply("a", 1, 1, "duplicate")]


def test_who_will_not_join_the_run_is_not_asked_until_it_reports():
    script = Script()
    assert script.decline("a", (0, 0), "no data") == []
    assert script.state.members["a"].refusal == "no data"
    script.ready("b")
    assert asked(script.update("b")) == ("b",)
    assert script.decline("b", (0, 0)) == [AbandonRound(2, 1, "too-few")]
    assert script.tick(DEADLINE_S) == []
    assert script.engine.wake_at is None
    assert asked(script.ready("a")) == ("a",)
    assert script.state.counters == {"refused": 2, "abandoned": 1}


def test_who_rested_and_is_back_is_asked_at_once_also_for_the_round_it_declined():
    script = Script()
    script.ready("a")
    assert script.decline("a") == [AbandonRound(1, 1, "too-few")]
    assert script.decline("a", (0, 0), "too hot") == []
    assert asked(script.ready("a")) == ("a",)


def test_who_refuses_before_its_first_round_is_not_admitted():
    script = Script(start_with=3)
    script.ready("a")
    script.decline("a", (0, 0))
    script.ready("b")
    assert of(Admit, script.ready("c")) == [Admit(DeviceReport("b")), Admit(DeviceReport("c"))]


def test_who_refuses_does_not_lower_the_quorum():
    script = Script(quorum=2)
    script.ready("a", "b")
    script.updates("a", "b")
    script.decline("b", (0, 0))
    assert script.tick(DEADLINE_S) == [AbandonRound(2, 1, "deadline")]
    assert script.engine.wake_at is None
    assert asked(script.ready("c")) == ("a", "c")


def test_a_late_joiner_is_admitted_before_the_next_round_and_takes_part_in_it():
    script = Script()
    script.ready("b")
    assert script.ready("a") == []
    assert script.update("b")[2:4] == [Admit(DeviceReport("a")), StartRound(Round(2, ("a", "b")), 1)]


def test_a_report_is_admitted_when_new_or_changed_and_not_twice():
    script = Script()
    assert of(Admit, script.ready("a", ratio=0.4)) == [Admit(DeviceReport("a", ratio=0.4))]
    script.ready("a", ratio=0.4)
    assert of(Admit, script.update("a")) == []
    assert of(Admit, script.ready("a", ratio=0.6)) == []  # not in the midst of a round
    assert of(Admit, script.update("a")) == [Admit(DeviceReport("a", ratio=0.6))]


def test_leavers_are_not_drawn_again_and_the_run_ends_when_none_is_left():
    script = Script(rounds=9, final_evaluation=True, start_with=2, quorum=2)
    script.ready("a", "b")
    script.update("a", leaving=True)
    assert asked(script.update("b")) == ("b",)  # the quorum shrinks with those that left
    script.gone("a")
    script.ready("a")
    assert asked(script.update("b", leaving=True)) == ("a", "b")
    assert script.state.stage == "evaluating"
    assert script.state.round_attempt == (3, 1)
    assert script.updates("a", "b")[2:] == [
        CloseFinalEvaluation(3, 1, ("a", "b")),
        FinishRun("every device has left"),
    ]


def test_a_device_that_leaves_with_a_late_update_is_no_longer_awaited():
    script = Script(participants=1, over_selection=2.0, start_with=2)
    script.ready("a", "b")
    script.update("b")
    assert script.update("a", (1, 1), leaving=True) == [DropReply("a", 1, 1, "late")]
    assert script.state.members["a"].left
    assert asked(script.decline("b")) == ()
    assert asked(script.tick(DEADLINE_S)) == ("b",)


def test_a_device_that_is_only_gone_has_one_deadline_to_come_back_before_the_run_ends():
    def two_devices_of_which_one_left_and_one_went():
        script = Script(participants=1, start_with=2)
        (first,) = asked(script.ready("a", "b"))
        (other,) = {"a", "b"} - {first}
        script.gone(other)
        assert asked(script.update(first, leaving=True)) == ()
        assert script.engine.wake_at == DEADLINE_S
        return script, other

    script, other = two_devices_of_which_one_left_and_one_went()
    assert asked(script.ready(other)) == (other,)
    script, other = two_devices_of_which_one_left_and_one_went()
    assert script.tick(DEADLINE_S) == [FinishRun("every device has left")]


def test_a_final_evaluation_after_an_abandoned_attempt_has_an_attempt_of_its_own():
    script = Script(rounds=5, final_evaluation=True, start_with=2, quorum=2)
    script.ready("a", "b")
    script.update("a", leaving=True)
    assert asked(script.tick(DEADLINE_S)) == ("b",)
    assert script.tick(2 * DEADLINE_S)[0] == AbandonRound(1, 2, "deadline")
    actions = script.update("b", (1, 2), leaving=True)
    assert actions[:2] == [DropReply("b", 1, 2, "stale"), AbandonRound(1, 3, "too-few")]
    assert actions[2] == StartRound(Round(1, ("a", "b"), final_evaluation=True), 4)
    assert script.update("a", (1, 1)) == [DropReply("a", 1, 1, "stale")]


def test_the_final_evaluation_closes_at_its_deadline_without_a_quorum():
    script = Script(rounds=1, final_evaluation=True, start_with=3, quorum=3)
    script.ready("a", "b", "c")
    script.updates("a", "b", "c")
    assert script.state.stage == "evaluating"
    script.update("b")
    script.decline("a")
    assert script.gone("c") == []
    assert script.update("b") == [DropReply("b", 2, 1, "duplicate")]
    assert script.tick(DEADLINE_S)[0] == CloseFinalEvaluation(2, 1, ("b",))
    assert script.engine.finished


def test_without_anybody_there_the_final_evaluation_is_skipped():
    script = Script(rounds=1, final_evaluation=True)
    script.ready("a")
    script.gone("a")
    assert script.update("a")[1:] == [CloseRound(1, 1, ("a",)), FinishRun("all rounds are done")]


def test_a_clock_that_jumps_ahead_costs_one_attempt():
    script = Script(start_with=2, quorum=2)
    script.ready("a", "b")
    actions = script.tick(1e12)
    assert of(AbandonRound, actions) == [AbandonRound(1, 1, "deadline")]
    assert script.engine.wake_at == 1e12 + DEADLINE_S


def test_a_restart_in_mid_round_goes_on_with_the_same_round():
    script = Script(start_with=3, quorum=2)
    script.now = 100.0
    script.ready("a", "b", "c")
    script.update("b")
    assert script.restart(now=5.0) == [StartRound(Round(1, ("a", "b", "c")), 1, resumed=True)]
    assert script.engine.wake_at == 5.0 + DEADLINE_S
    assert not any(member.ready for member in script.state.members.values())
    assert script.ready("b") == []
    assert script.ready("a") == [SendTask("a", 1, 1)]
    assert script.update("b", (1, 1)) == [DropReply("b", 1, 1, "duplicate")]
    script.update("a")
    assert script.update("c")[1] == CloseRound(1, 1, ("a", "b", "c"))  # arrived before it reported


def test_a_restart_closes_a_round_that_needs_nobody_any_more():
    script = Script(start_with=3)
    script.ready("a", "b", "c")
    script.update("b")
    assert script.restart(participants=1) == [
        StartRound(Round(1, ("a", "b", "c")), 1, resumed=True),
        CloseRound(1, 1, ("b",)),
    ]


def test_a_restart_while_waiting_or_finished_starts_nothing():
    script = Script(rounds=1)
    assert script.restart() == []
    script.ready("a")
    script.decline("a")
    assert script.restart(now=-3.0) == []
    assert script.engine.wake_at == -3.0 + DEADLINE_S
    script.ready("a")
    assert asked(script.tick(7.0)) == ("a",)
    script.update("a")
    assert script.engine.finished
    assert script.restart() == []


def test_between_two_rounds_those_that_were_there_may_come_back_before_one_trains_alone():
    script = Script(rounds=1)
    script.ready("a", "b", "c")
    script.updates(*script.state.participants)
    script.ready("b", "c")
    assert script.engine.finished
    script.run = RunSection(name="test", rounds=2, final_evaluation=False)
    script.engine = RoundEngine(script.run, script.round, script.state)
    script.engine.reopen()
    assert script.restart(now=100.0) == []
    assert script.ready("a", "c") == []
    assert script.engine.wake_at == 100.0 + DEADLINE_S, "GATHER_S, but not longer than a round may take"
    assert asked(script.ready("b")) == ("a", "b", "c")


@pytest.mark.parametrize("refuses", [False, True])
def test_who_does_not_come_back_in_time_or_refuses_is_not_waited_for(refuses):
    script = Script(rounds=2, start_with=3)
    script.ready("a", "b")
    script.restart()
    script.ready("a", "c")
    assert script.engine.wake_at == DEADLINE_S
    if refuses:
        assert asked(script.decline("b", turn=(0, 0))) == ("a", "c")
    else:
        script.ready("d")
        assert script.state.stage == "waiting", "three are there, but b may come back"
        assert asked(script.tick(DEADLINE_S)) == ("a", "c", "d")
    assert script.engine.state.timing.gather_until is None


def test_an_event_lost_in_a_crash_leads_to_the_same_actions_when_it_is_offered_again():
    script = Script(start_with=2)
    script.ready("a", "b")
    script.update("a")
    stored = script.state.copy()
    lost = script.update("b")
    script.engine = RoundEngine(script.run, script.round, stored)
    script.engine.resume(0.0)
    script.ready("a", "b")
    assert script.update("b") == lost


class Counted(dict):
    """Members that count how often they are looked up, and do not let anybody go through them all."""

    looked_up = 0

    def __getitem__(self, name):
        self.looked_up += 1
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.looked_up += 1
        return super().get(name, default)

    def _all(self, *_):
        raise AssertionError("an event goes through all members")

    __iter__ = items = values = keys = copy = _all


@pytest.mark.parametrize("mode", [{}, {"participants": 20}])
def test_an_event_in_an_open_round_costs_the_same_in_a_small_and_a_large_fleet(mode):
    lookups = {}
    for size in (50, 500):
        names = [f"d{i:03}" for i in range(size)]
        script = Script(start_with=size, quorum=2, **mode)
        script.ready(*names)
        drawn = script.state.participants
        script.update(drawn[0])  # the groups are there
        script.state.take_changed()
        script.state.members = members = Counted(script.state.members)
        rows = []
        for act, who in (
            (script.update, drawn[-1]),
            (script.update, drawn[-1]),
            (script.decline, drawn[-2]),
            (script.gone, drawn[-3]),
            (script.ready, drawn[-3]),
            (script.ready, "new"),
            (script.tick, 0.1),
        ):
            act(who)
            rows.append(sorted(script.state.take_changed()))
        lookups[size] = members.looked_up
        assert rows == [[drawn[-1]], [], [drawn[-2]], [drawn[-3]], [drawn[-3]], ["new"], []]
    assert lookups[50] == lookups[500]


def test_a_device_that_comes_while_the_run_waits_costs_the_same_in_a_small_and_a_large_fleet():
    lookups = {}
    for size in (50, 500):
        script = Script(start_with=size + 10)
        script.ready(*[f"d{i:03}" for i in range(size)])
        script.state.members = members = Counted(script.state.members)
        script.ready("new")
        lookups[size] = members.looked_up
    assert lookups[50] == lookups[500]


def test_the_view_tells_what_every_device_does():
    script = Script(start_with=4, quorum=2)
    script.ready("a", "b", "c", "d")
    script.update("a")
    script.decline("b", reason="18 s of 10 s")
    script.gone("c")
    script.ready("late")
    members = script.state.members
    assert {name: part_of(script.state, name) for name in members} == {
        "a": "replied", "b": "declined", "c": "awaited", "d": "awaited", "late": "idle"
    }  # fmt: skip
    assert [name for name, member in members.items() if not member.ready] == ["c"]
    assert members["b"].declined_reason == "18 s of 10 s"
    model = {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10}
    settings = parse_run({"run": {"name": "r"}, "model": model, "method": {"name": "fedavg"}})
    settings = msgspec.structs.replace(settings, round=script.round)
    view = StatusReader(settings, 10).status(script.state, Ledger(), 0.0)
    assert (view.stage, view.round, view.attempt) == ("training", 1, 1)
    assert (view.asked, view.replied, view.target) == (4, 1, 4)
    assert view.round_left_s == DEADLINE_S


def test_a_device_that_refused_the_run_is_not_waited_for():
    script = Script(start_with=3)
    script.ready("a", "b")
    refused = script.do(Declined("c", 0, 0, "no camera here"))
    assert asked(refused) == ("a", "b")


def test_a_refusal_stands_for_one_device_and_as_long_as_it_lasts():
    script = Script(start_with=4)
    script.ready("a")
    assert not script.do(Declined("c", 0, 0, "no"))
    assert not script.do(Declined("c", 0, 0, "no, again"))
    assert not asked(script.ready("b"))
    script.ready("c")
    assert asked(script.do(Declined("d", 0, 0, "no"))) == ("a", "b", "c")
