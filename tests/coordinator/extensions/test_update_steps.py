"""Figures of each update's step, in records, status, summary and report; and the quarantine."""

from dataclasses import replace

import numpy as np
import pytest
from tests.coordinator.extensions.test_norm_bound import forged
from tests.helpers.hostile_world import SPEC, World, stores_closed  # noqa: F401 - a fixture

from fleetune.coordinator.extensions.quarantine import Standing, held_of
from fleetune.coordinator.queries import queries
from fleetune.coordinator.reports.report import summary_of, write_report
from fleetune.coordinator.rounds.records import StepFigures
from fleetune.coordinator.run.stored_run import look_at
from fleetune.protocols.errors import SettingError

SCALED = forged(lambda values: 50 * values)


@pytest.fixture
def weights():
    return np.linspace(-1, 1, SPEC.size, dtype=np.float32)


def until(number):
    """Forge the updates of the rounds before this one."""
    return lambda reply: SCALED(reply) if reply.round < number else reply


def test_an_outlier_is_named_in_status_summary_and_report(weights, tmp_path):
    World(tmp_path, "fedavg", {}, weights, forge=SCALED, norm_bound=0.0, robust="clip").play()
    status, devices = queries.status_and_devices(tmp_path)
    [line] = status.outliers
    assert line.startswith("mallory sends unusual updates: 4 of its last 4 rounds; the last step has ")
    by_name = {one.device: one.metrics for one in devices}
    assert by_name["mallory"]["step_ratio"] > 3 > by_name["a"]["step_ratio"]
    assert by_name["mallory"]["clipped"] == 1.0
    with look_at(tmp_path) as run:
        summary = summary_of(run, simulated=False)
    rows = summary.by_device
    assert rows["mallory"].steps.ratio > 3 > rows["a"].steps.ratio
    assert rows["mallory"].steps.clipped == 0.75  # the first round clips nothing
    assert -1 <= rows["mallory"].steps.cosine <= 1
    write_report(tmp_path, run.settings, summary, queries.rounds(tmp_path))
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert all(title in report for title in ("step size", "step direction", "clipped rounds"))


def test_an_honest_fleet_names_nobody(weights, tmp_path):
    World(tmp_path, "fedavg", {}, weights).play()
    assert queries.status(tmp_path).outliers == ()


@pytest.mark.parametrize(
    ("step", "outlying"),
    [
        (StepFigures(1.0, 0.5), False),
        (StepFigures(3.5, 0.5), True),
        (StepFigures(1.0, -0.5), True),
        (StepFigures(None, None), False),
    ],
)
def test_long_steps_and_steps_against_the_others_are_outlying(step, outlying):
    assert step.is_outlying is outlying


@pytest.mark.parametrize("restart", [False, True])
def test_quarantine_begins_after_the_rounds_set_and_ends_after_as_many(weights, tmp_path, restart):
    world = World(
        tmp_path,
        "fedavg",
        {},
        weights,
        forge=until(4),
        norm_bound=0.0,
        robust="median",
        quarantine=2,
        rounds=9,
    )
    world.join()
    while len(world.closed) < 3:
        world.step()
    if restart:
        world.restart()
    while world.finished is None:
        world.step()
    # outlying in rounds 1 to 3, held from round 3 on, not outlying in 4 and 5, free from 6 on
    assert world.controller.ledger.refusals_by_device["mallory"]["quarantined"] == 3
    with look_at(tmp_path) as run:
        assert summary_of(run, simulated=False).refused_by_device == {"mallory": {"quarantined": 3}}


def test_an_update_in_quarantine_does_not_count(weights, tmp_path):
    held = World(
        tmp_path / "a", "fedavg", {}, weights, forge=SCALED, norm_bound=0.0, quarantine=1, rounds=2
    ).play()
    last = held.controller.records()[-1].devices
    assert held.controller.ledger.refusals == {"quarantined": 1}

    def without_samples(reply):
        forged_reply = SCALED(reply)
        if reply.round == 1:
            return forged_reply
        return replace(forged_reply, update=replace(forged_reply.update, num_samples=0))

    as_if = World(tmp_path / "b", "fedavg", {}, weights, forge=without_samples, norm_bound=0.0, rounds=2)
    assert held.shared().tobytes() == as_if.play().shared().tobytes()
    assert last["mallory"].step.ratio > 3


def test_a_forgotten_device_has_no_standing(weights, tmp_path):
    world = World(
        tmp_path, "fedavg", {}, weights, forge=SCALED, norm_bound=0.0, robust="median", quarantine=2
    )
    world.join()
    while len(world.closed) < 3:
        world.step()
    stored = world.run.store.get("quarantine")
    assert b"mallory" in stored
    world.controller.forget("mallory")
    assert b"mallory" not in world.run.store.get("quarantine")


def test_standing():
    standing = Standing()
    for outlying, held in [(1, 0), (0, 0), (1, 0), (1, 1), (0, 1), (1, 1), (0, 1), (0, 0)]:
        standing = standing.after(outlying=bool(outlying), enough=2)
        assert standing.held is bool(held)


def test_never_half_of_a_round_is_held():
    held = Standing(held=True)
    assert held_of(dict.fromkeys("abcd", held), tuple("abcd")) == ("a",)
    assert held_of(dict.fromkeys("ab", held), tuple("abcde")) == ("a", "b")
    assert held_of({"a": held}, ("a",)) == ()


def test_quarantine_needs_a_mean(weights, tmp_path):
    with pytest.raises(SettingError, match=r"round\.quarantine: kapc cannot have it, because each device"):
        World(tmp_path, "kapc", {}, weights, quarantine=3)
