"""Simulated runs with an objective: what is proposed fits, rounds are shorter, and it is explained."""

import dataclasses
import re
from statistics import median

import pytest
import rich.console
from msgspec import UNSET, structs
from tests.tools.simulator.test_simulate_budgets import play, settings

from fleetune.coordinator.reports.proposals.explanation import by_ratio, explanation
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.proposals.planner import Planner
from fleetune.coordinator.run.stored_run import look_at
from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods.fedspu import FedSPU
from fleetune.protocols.update.encodings import chosen

# a slow board among fast ones, all on links that count for less than its work
FLEET = {
    "uplink_mbps": 50.0,
    "downlink_mbps": 50.0,
    "boards": {"raspberry-pi-zero-2w": 1, "n100-gateway": 3},
}
LONG = {"deadline_s": 30}


def shown(group):
    console = rich.console.Console(width=200)
    with console.capture() as captured:
        console.print(group)
    return captured.get()


def retold(member, **of_report):
    return {
        "report": dataclasses.replace(member.report, **of_report),
        "ready": member.ready,
        "assigned": member.assigned,
    }


def worthwhile(run, state):
    planner = Planner(run.settings.objective, tuple(chosen(one).cost for one in run.settings.uplinks))
    return planner.worthwhile(state, planner.candidates(state, state.members))


def test_rounds_are_shorter_and_a_slow_board_does_less(tmp_path):
    chosen, at_length = play(tmp_path, "a", fleet=FLEET, round=LONG)
    paced, in_time = play(tmp_path, "b", fleet=FLEET, round=LONG, objective={"minimise": "time"})
    assert {ratio for used in chosen.ratios.values() for ratio in used} == {1.0}
    assert len({ratio for used in paced.ratios.values() for ratio in used}) > 1
    assert in_time[-1].closed_s < 0.7 * at_length[-1].closed_s


def test_what_a_round_took_is_what_was_expected_at_the_ratio_that_was_proposed(tmp_path):
    _, records = play(tmp_path, fleet=FLEET, round=LONG, objective={"minimise": "time"})
    for record in records[2:-1]:
        for reply in record.devices.values():
            assert abs(reply.actual.train_s - reply.predicted.train_s) <= 0.02 * reply.predicted.train_s


def test_the_same_file_plays_the_same_run_twice(tmp_path):
    first, second = (
        play(tmp_path, name, fleet=FLEET, round=LONG, objective={"minimise": "energy"}) for name in "ab"
    )
    assert first[0].ratios == second[0].ratios
    assert first[1] == second[1]


def test_the_method_states_the_utility_of_ratios(tmp_path, monkeypatch):
    asked = {"fleet": FLEET, "round": LONG, "objective": {"minimise": "bytes"}}
    usual, _ = play(tmp_path, "a", **asked)
    monkeypatch.setattr(FedSPU, "utility", staticmethod(lambda budget: 1 - budget.ratio / 2))
    small, _ = play(tmp_path, "b", **asked)
    used = [{ratio for ratios in one.ratios.values() for ratio in ratios} for one in (small, usual)]
    assert max(used[0]) < max(used[1])


def test_no_larger_ratio_than_the_run_allows_is_proposed(tmp_path):
    summary, _ = play(tmp_path, fleet=FLEET, round=LONG, objective={"minimise": "time", "at_most": 0.4})
    assert max(ratio for used in summary.ratios.values() for ratio in used) <= 0.4


def test_dealt_ratios_stay_as_they_are(tmp_path):
    fleet = {**FLEET, "ratios": [0.5]}
    with_one, _ = play(tmp_path, "a", fleet=fleet, round=LONG, objective={"minimise": "time"})
    without, _ = play(tmp_path, "b", fleet=fleet, round=LONG)
    assert with_one.ratios == without.ratios
    assert (with_one.bytes.up, with_one.bytes.down) == (without.bytes.up, without.bytes.down)


def test_it_is_explained(tmp_path):
    without, _ = play(tmp_path, "none", fleet=FLEET)
    assert without.by_ratio is without.by_encoding is UNSET
    wanted = {"minimise": "time"}
    summary, _ = play(tmp_path, fleet=FLEET, round=LONG, objective=wanted)
    with look_at(tmp_path / "a") as run:
        state, records = run.controller.engine_state, run.controller.records()
        said = shown(explanation(run.settings, state, records))
    rows = by_ratio(records)
    assert sum(row.replies for row in rows) == sum(
        len(record.devices) for record in records if not record.final_evaluation
    )
    assert "minimise time: most utility a second" in said
    assert re.search(r"\d of 4 devices could do more than the plan asks for", said)
    assert re.search(r"the target round duration is .*, set by device-\d", said)
    assert summary.by_ratio == rows
    with look_at(tmp_path / "a") as run:
        none = shown(explanation(settings(), state, []))
    assert "no reply yet" in none
    assert "no [objective]" in none


THIN = {"uplink_mbps": 0.02, "downlink_mbps": 50.0, "boards": {"n100-gateway": 4}}


def test_fewer_bytes_by_thinner_updates(tmp_path):
    for name, allowed in ("own", []), ("thinner", ["lowrank", "int4"]):
        wanted = {"minimise": "bytes", "encodings": allowed}
        summary, _ = play(tmp_path, name, fleet=THIN, round=LONG, objective=wanted)
    seen = {}
    for name in "own", "thinner":
        with look_at(tmp_path / name) as run:
            state, records = run.controller.engine_state, run.controller.records()
            words = shown(explanation(run.settings, state, records))
        seen[name] = sum(one.bytes_up for record in records[:-1] for one in record.devices.values()), words
    assert seen["thinner"][0] < 0.5 * seen["own"][0]
    assert "updates in the latest plan: 4 by lowrank" in seen["thinner"][1]
    assert "updates in the latest plan" not in seen["own"][1]
    assert re.search(r"compression error: \d+ %\s+by\s+lowrank", seen["thinner"][1])
    assert "compression error" not in seen["own"][1]
    replies = [reply for record in records[:-1] for reply in record.devices.values()]
    sizes = {row.encoding: (row.replies, row.up) for row in summary.by_encoding}
    assert sum(count for count, _ in sizes.values()) == len(replies)
    thin = [reply.bytes_up for reply in replies if reply.encoding == "lowrank"]
    assert sizes["lowrank"] == (len(thin), median(thin))
    assert re.search(rf"updates of all rounds, with .*{len(thin)} by lowrank", seen["thinner"][1], re.DOTALL)


def test_rounds_over_thin_links_are_shorter_with_thinner_updates_and_last_as_long_as_was_expected(tmp_path):
    took_s = {}
    for name, allowed in ("own", []), ("thinner", ["lowrank", "int4"]):
        wanted = {"minimise": "time", "encodings": allowed}
        _, records = play(tmp_path, name, fleet=THIN, round=LONG, objective=wanted)
        took_s[name] = records[-1].closed_s
    assert took_s["thinner"] < 0.7 * took_s["own"]
    for record in records[4:-1]:
        for reply in record.devices.values():
            assert abs(reply.actual.round_s - reply.predicted.round_s) <= 0.2 * reply.predicted.round_s


def test_encodings_that_take_no_fewer_bytes_than_the_runs_own_change_nothing(tmp_path):
    """And one of which there is none is refused."""
    runs = [
        play(tmp_path, name, fleet=THIN, round=LONG, objective={"minimise": "time", "encodings": allowed})[1]
        for name, allowed in (("none", []), ("raw", ["raw"]))
    ]
    assert runs[0] == runs[1]
    with pytest.raises(SettingError, match=r"objective.*encodings.*int5.*did you mean '"):
        settings(objective={"minimise": "time", "encodings": ["int5"]})


def test_energy_counts_what_boards_draw_while_they_wait(tmp_path):
    """Three gateways of 5.5 W idle wait for a Pi Zero: that no joule of its own is worth."""
    _, records = play(tmp_path, fleet=FLEET, round=LONG, objective={"minimise": "energy"})
    with look_at(tmp_path / "a") as run:
        state = run.controller.engine_state
        said = shown(explanation(run.settings, state, run.controller.records()))
        silent = EngineState(members={})
        for name, member in state.members.items():
            silent.put(name, **retold(member, idle_w=UNSET))
        unsaid = shown(explanation(run.settings, silent, []))
        waited, free = (worthwhile(run, one) for one in (state, silent))
    assert re.search(r"the target round duration is .*, set by device-\d", said)
    assert "idle power" not in said
    assert "4 of 4 devices do not report their idle power" in unsaid
    assert "the target round duration is" not in unsaid
    longest_s, at_will_s = (
        max(one.seconds for some in kept.values() for one in some) for kept in (waited, free)
    )
    assert longest_s < at_will_s
    assert len(records) > 2


def test_devices_that_do_not_know_what_they_draw_are_told_of(tmp_path):
    play(tmp_path, fleet=FLEET, round=LONG, objective={"minimise": "energy"})
    with look_at(tmp_path / "a") as run:
        state, records = run.controller.engine_state, run.controller.records()
        for name, member in state.members.items():
            unknown = tuple(structs.replace(one, joules=None) for one in member.report.affords)
            report = dataclasses.replace(member.report, affords=unknown)
            state.put(name, report=report)
        said = shown(explanation(run.settings, state, records))
        nobody = shown(explanation(run.settings, EngineState(), []))
    assert "4 of 4 devices do not report their energy" in said
    assert "devices" not in nobody.split("minimise")[1].split("idling included")[1]


def test_the_option_of_most_work_is_proposed_and_small_ratios_are_not_tried(tmp_path):
    asked = {"fleet": FLEET, "round": LONG, "objective": {"minimise": "time"}, "method": {"name": "fedpurin"}}
    summary, _ = play(tmp_path, **asked)
    assert min(ratio for used in summary.ratios.values() for ratio in used) >= 0.3
