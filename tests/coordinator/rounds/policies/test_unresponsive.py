"""Devices that enrol and never answer: they cost deadlines ever more rarely, and honest rounds nothing."""

import msgspec
import pytest
from tests.coordinator.rounds.policies.test_semi_asynchronous import buffered, windowed
from tests.coordinator.rounds.test_engine import Script

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.policies.unresponsive import LONGEST_REST, MISSES, miss, rests
from fleetune.protocols.method.choice import DeviceReport


def played(script, rounds, honest):
    """Honest devices answer, others let each deadline pass; who was asked, by round."""
    seen = {}
    while not script.engine.finished and len(seen) < rounds:
        state = script.state
        turn = state.round_attempt
        seen.setdefault(turn, state.participants)
        for device in state.participants:
            if state.round_attempt == turn and device in honest:
                script.update(device)
        if script.state.round_attempt == turn:
            script.tick(script.state.timing.until)
    return seen


def test_a_silent_device_holds_three_rounds_up_and_then_ever_fewer():
    script = Script(rounds=200, start_with=3)
    script.ready("a", "b", "ghost")
    seen = played(script, 200, {"a", "b"})
    held_up = [turn.number for turn, devices in seen.items() if "ghost" in devices]
    assert held_up == [1, 2, 3, 5, 9, 17, 33, 65, 129, 193]
    assert all({"a", "b"} <= set(devices) for devices in seen.values())


def test_one_answer_is_enough_to_count_again_and_a_restart_forgets_nothing():
    script = Script(rounds=50, start_with=3)
    script.ready("a", "b", "lost")
    played(script, 3, {"a", "b"})
    script.restart(script.now)
    assert script.state.members["lost"].observed.missed == MISSES
    script.ready("a", "b", "lost")
    assert script.state.participants == ("a", "b"), "being there is no answer"
    script.updates("a", "b")
    assert script.state.participants == ("a", "b", "lost")
    script.update("lost")
    assert script.state.members["lost"].observed.missed == 0
    script.updates("a", "b")
    assert "lost" in script.state.participants


@pytest.mark.parametrize("late", ["update", "decline"])
def test_an_answer_that_comes_too_late_is_one(late):
    script = Script(rounds=50, start_with=2)
    script.ready("a", "slow")
    for _ in range(MISSES + 2):
        before = script.state.round_attempt
        script.update("a")
        script.tick(script.state.timing.until)
        getattr(script, late)("slow", before)
        assert script.state.members["slow"].observed.missed == 0
        assert script.state.participants == ("a", "slow")


def test_those_that_answer_are_drawn_first_and_the_silent_fill_up_what_is_missing():
    script = Script(rounds=60, participants=3, start_with=12)
    ghosts = tuple(f"ghost-{index}" for index in range(9))
    script.ready("a", "b", "c", *ghosts)
    played(script, 60, {"a", "b", "c"})
    assert script.state.rounds_done >= 40, "nine ghosts among three honest devices"

    script = Script(rounds=9, quorum=2)
    script.ready("a", "ghost")
    seen = played(script, 8, {"a"})
    assert all(devices == ("a", "ghost") for devices in seen.values()), "one alone is no round"


def test_a_round_that_closed_in_time_is_no_proof():
    script = Script(rounds=50, participants=1, over_selection=2.0, start_with=2)
    script.ready("a", "b")
    for _ in range(MISSES + 1):
        script.update("a")
    assert script.state.members["b"].observed.missed == 0


def test_semi_asynchronously_too():
    for script in (
        buffered(1, max_staleness=0, rounds=90, start_with=2),
        windowed(max_staleness=0, rounds=90, start_with=2),
    ):
        script.ready("a", "ghost")
        seen = []
        while not script.engine.finished:
            number = script.state.round_attempt.number
            if "ghost" in script.state.participants and script.state.members["ghost"].asked.number == number:
                seen.append(number)
            script.update("a")
            while script.state.round_attempt.number == number and not script.engine.finished:
                script.tick(script.state.timing.until)
        assert seen[:4] == [1, 2, 3, 5]
        assert len(seen) <= 9


def test_a_member_that_was_stored_before_has_missed_nothing():
    stored = msgspec.to_builtins(EngineState(members={"a": Member(DeviceReport("a"))}))
    del stored["members"]["a"]["observed"]
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=EngineState)
    assert state.members["a"] == Member(DeviceReport("a"))


def test_a_rest_is_bounded():
    script = Script()
    script.ready("a")
    for _ in range(100):
        miss(script.state, "a")
    member = script.state.members["a"]
    assert rests(member, member.asked.number + LONGEST_REST - 1)
    assert not rests(member, member.asked.number + LONGEST_REST)
