"""Runs whose coordinator proposes ratios: all is planned, done and told at these, whatever is killed when."""

import shutil
from itertools import pairwise

import pytest
from tests.conftest import tiny_spec
from tests.helpers.nightly import sooner
from tests.helpers.played_run import DEVICES, PlayedRun

from fleetune.edge_agent.run.task_reader import TaskPreview, preview_task
from fleetune.protocols.method.choice import RATIOS, DeviceReport
from fleetune.protocols.methods import REGISTRY, from_section
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Assignment

SPEC = tiny_spec()


def with_ratios():
    """Methods that offer a device more than one."""
    for name in REGISTRY:
        method = from_section({"name": name}, SPEC)
        if len(method.choices(DeviceReport("a", num_samples=10))) > 1:
            yield name


def played(folder, method="fedspu", minimise="time", **part):
    run = PlayedRun(folder, method, "synchronous", minimise=minimise)
    run.play(**part)
    found = run.end()
    run.close()
    return found


@pytest.mark.parametrize(
    ("method", "minimise"),
    sooner(
        [*((method, "time") for method in with_ratios()), ("fedspu", "energy"), ("fedspu", "bytes")],
        kept=[("fedspu", "time"), ("fedpurin", "time"), ("fjord", "time"), ("fedspu", "energy")],
    ),
)
def test_kills_of_both_sides_change_no_bit(tmp_path, method, minimise):
    wanted = played(tmp_path / "whole", method, minimise=minimise)
    for stopped in (3, 8):
        folder = tmp_path / f"stopped-{stopped}"
        played(folder, method, minimise=minimise, end=stopped)
        shutil.copytree(folder, tmp_path / f"copy-{stopped}")
        found = played(tmp_path / f"copy-{stopped}", method, minimise=minimise, begin=stopped)
        assert (found["shared"], found["personal"]) == (wanted["shared"], wanted["personal"])
        assert found["records"] == wanted["records"]


@pytest.mark.parametrize("method", list(with_ratios()))
def test_devices_work_at_what_is_proposed_and_never_at_more_than_they_afford(tmp_path, method):
    for record in played(tmp_path, method)["records"]:
        for device, reply in record.devices.items():
            assert reply.ratio in RATIOS
            assert reply.ratio <= DEVICES[device]


def test_who_would_hold_up_the_others_does_a_share_of_the_local_training(tmp_path):
    records = played(tmp_path)["records"]
    replies = [reply for one in records for reply in one.devices.items()]
    shares = {name: {reply.local_work for device, reply in replies if device == name} for name in DEVICES}
    assert shares["d"] == {0.25}
    assert all(max(shares[name]) == 1.0 for name in "abc")


def test_several_ratios_are_tried_in_a_round(tmp_path):
    records = played(tmp_path)["records"]
    assert max(len({reply.ratio for reply in one.devices.values()}) for one in records) > 1
    told = [{device: reply.ratio for device, reply in one.devices.items()} for one in records]
    assert any(before != after for before, after in pairwise(told))


def test_over_these_links_thinner_updates_are_asked_for(tmp_path):
    """So the kills above met updates of several encodings, and what they leave out."""
    run = PlayedRun(tmp_path, "fedspu", "synchronous", minimise="time")
    run.play(end=0)
    asked = {preview_task(task, SPEC).budget.uplink for _, task in run.tasks.values()}
    run.close()
    assert len(asked) > 1
    assert max(asked) > 0


@pytest.mark.parametrize("minimise", ["none", "time"])
def test_a_task_says_its_ratio_only_where_it_is_proposed(tmp_path, minimise):
    run = PlayedRun(tmp_path, "fedspu", "synchronous", minimise=minimise)
    run.play(end=0)
    for device, (_, task) in run.tasks.items():
        assignment = codec.decode(task, Assignment[run.run.method.task_type], SPEC)
        assert (assignment.ratio in RATIOS) == (minimise == "time"), device
        asked = preview_task(task, SPEC)
        if minimise == "none":
            assert asked == TaskPreview()
            continue
        assert asked.budget.ratio == assignment.ratio
        assert 0 < asked.span_s < run.run.settings.round.deadline_s, "the pace, with the slack"
    run.close()


def test_dealt_ratios_are_not_second_guessed():
    said = {
        "run": {"name": "r", "rounds": 1},
        "model": {"name": "tiny", "input_shape": [4], "num_classes": 3},
        "method": {"name": "fedspu"},
        "objective": {"minimise": "energy"},
    }
    assert parse_run(said).proposes_ratios
    assert not parse_run(said | {"fleet": {"ratios": [0.5]}}).proposes_ratios
