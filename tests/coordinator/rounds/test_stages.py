"""The table of stages: every transition that the engine asks for stands in it, and no other."""

import ast
from typing import get_args

import pytest
from tests.helpers.places import ROOT

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.stages import TRANSITIONS, Stage, Transition, after


def test_every_stage_has_a_row_and_every_transition_is_in_one():
    assert set(TRANSITIONS) == set(get_args(Stage))
    assert {one for row in TRANSITIONS.values() for one in row} == set(get_args(Transition))
    assert {to for row in TRANSITIONS.values() for to in row.values()} == set(get_args(Stage))


@pytest.mark.parametrize("stage", get_args(Stage))
@pytest.mark.parametrize("transition", get_args(Transition))
def test_a_transition_that_the_table_does_not_have_is_refused(stage, transition):
    if transition in TRANSITIONS[stage]:
        assert after(stage, transition) == TRANSITIONS[stage][transition]
        return
    state = EngineState(stage=stage)
    with pytest.raises(ValueError, match="has no transition"):
        state.move(transition)
    assert state.stage == stage


def test_only_the_table_changes_a_stage():
    asked, written = set(), []
    for path in sorted((ROOT / "coordinator").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if node.func.attr == "move" and node.args and isinstance(node.args[0], ast.Constant):
                asked.add(node.args[0].value)
            if node.func.attr == "change" and any(word.arg == "stage" for word in node.keywords):
                written.append(path.name)
    assert asked == set(get_args(Transition))
    assert written == ["engine_state.py"]
