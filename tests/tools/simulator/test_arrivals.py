"""Simulated devices whose data grow: what comes, what is kept, and what drift brings about."""

import json
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from tests.tools.simulator.test_simulate import settings

from fleetune.coordinator.metrics.summary import DaySummary, Summary
from fleetune.coordinator.reports.report import figures
from fleetune.coordinator.run.enrolment import begin
from fleetune.protocols.errors import FleetuneError, SettingError
from fleetune.tools.simulator import run_devices
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.runner import simulate
from fleetune.tools.simulator.streams.arrivals import ArrivalSchedule
from fleetune.tools.simulator.streams.stream_devices import stream_devices

CHANGES = 4
ARRIVALS = {"first": 240, "per_day": 120, "times_a_day": 4}
FLEET = {"devices": 2, "boards": {"raspberry-pi-4b": 2}, "days": 5}
GROWING = {
    "run": {"rounds": "open"},
    "method": {"name": "fedavg"},
    "data": {"partition": {"kind": "iid", "test_fraction": 0.5}, "arrivals": ARRIVALS},
    "training": {"epochs": 3, "batch_size": 10, "learning_rate": 0.1},
    "schedule": {"first_rounds": 2, "every": "24h", "window": "02:00-05:00"},
    "fleet": FLEET,
}


def growing(*, arrivals=None, **sections):
    data = {**GROWING["data"], "arrivals": {**ARRIVALS, **(arrivals or {})}}
    return settings(**{**GROWING, "data": data, **sections})


def play(folder, wanted, workers=0):
    """Its summary, the shared model in bytes, and on which days training rounds opened."""
    run, summary = simulate(wanted, folder, workers=workers, fresh=True)
    weights, records = run.controller.shared_model.tobytes(), run.controller.records()
    days = [1 + int(one.opened_s // 86400) for one in records if not one.final_evaluation]
    run.store.close()
    return summary, weights, days


def looked_at(path):
    """How many samples a store keeps, and what it refused, without its clock going on."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as store:
        (count,) = store.execute("SELECT count(*) FROM sample WHERE dropped IS NULL").fetchone()
        return count, dict(store.execute("SELECT kind, count FROM refusal"))


def test_a_night_each_trains_on_what_came_and_the_same_seed_plays_the_same(tmp_path):
    summary, weights, nights = play(tmp_path / "a", growing())
    assert nights == [1, 1, 1, 2, 3, 4, 5], "two rounds at once, then one a night"
    assert [day.day for day in summary.days] == [1, 2, 3, 4, 5]
    assert summary.days[-1].score > summary.days[0].score + 0.02
    assert [day.rounds for day in summary.days] == [3, 4, 5, 6, 7]
    assert 0 < summary.days[0].joules < summary.days[-1].joules == pytest.approx(summary.joules)
    assert summary.days[-1].up == summary.bytes.up
    held = {row.num_samples for row in summary.by_device.values()}
    assert all(300 < one < 540 for one in held), "half of 840 are tested on, by their content"
    again, same, _ = play(tmp_path / "b", growing())
    assert (weights, summary.days) == (same, again.days)
    first = [
        ArrivalSchedule(growing(run={"seed": seed}), PartitionedData.of_run(growing())).at_first(0)[1]
        for seed in (0, 1)
    ]
    assert first[0].tolist() != first[1].tolist(), "another seed deals and draws otherwise"


def test_a_simulation_that_was_cut_short_plays_the_same_from_its_beginning(tmp_path):
    """By --fresh: what it left is replaced, stores of samples too."""

    class Cut:
        def observe(self, event):
            if getattr(getattr(event, "record", None), "number", 0) == 3:
                raise KeyboardInterrupt

    short = growing(fleet={**FLEET, "days": 2})
    whole, weights, _ = play(tmp_path / "whole", short)
    with pytest.raises(KeyboardInterrupt):
        simulate(short, tmp_path / "cut", workers=0, fresh=True, observers=[Cut()])
    assert (tmp_path / "cut" / "devices" / "device-0.samples.sqlite").exists()
    again, same, _ = play(tmp_path / "cut", short)
    assert (weights, whole.days) == (same, again.days)


def test_worker_processes_change_nothing(tmp_path):
    short = growing(arrivals={"times_a_day": 1}, fleet={**FLEET, "days": 2})
    alone, weights, _ = play(tmp_path / "a", short)
    pooled, same, _ = play(tmp_path / "b", short, workers=1)
    assert (weights, alone.days) == (same, pooled.days)


def test_what_a_device_keeps_is_bounded_and_old_samples_go(tmp_path):
    kept = growing(arrivals={"keep": {"keep_days": 2}})
    play(tmp_path / "a", kept)
    count, refused = looked_at(tmp_path / "a" / "devices" / "device-0.samples.sqlite")
    assert 200 < count <= 270, "those of two days"
    assert refused == {}
    with pytest.raises(SettingError, match=r"data\.arrivals\.keep"):
        play(tmp_path / "b", growing(arrivals={"keep": {"keep_weeks": 2}}))


def test_drift_opens_rounds_once_labels_mean_something_else_and_not_before(tmp_path):
    change = {"kind": "rotate-classes", "day": CHANGES}
    on_drift = {"first_rounds": 12, "drift": True}
    fleet = {**FLEET, "days": 5}
    wanted = growing(arrivals={"change": change}, schedule=on_drift, fleet=fleet)
    summary, _, days = play(tmp_path / "a", wanted)
    assert days[:12] == [1] * 12
    assert days[12:], "it was noticed"
    assert min(days[12:]) >= CHANGES
    scores = {day.day: day.score for day in summary.days}
    assert scores[CHANGES] < 0.5 < scores[CHANGES - 1]
    assert summary.days[CHANGES - 2].joules == summary.days[0].joules < summary.days[-1].joules


def test_a_run_whose_rounds_are_done_goes_on_being_judged(tmp_path):
    summary, _, days = play(tmp_path / "a", growing(run={"rounds": 3}, schedule={}))
    assert days == [1, 1, 1]
    assert [day.rounds for day in summary.days] == [3] * 5
    assert all(day.score is not None for day in summary.days)


@pytest.mark.parametrize("kind", ["invert", "shift"])
def test_inputs_that_change_are_noticed(tmp_path, kind):
    wanted = growing(
        arrivals={"change": {"kind": kind, "day": CHANGES}}, schedule={"first_rounds": 1, "drift": True}
    )
    _, _, days = play(tmp_path / "a", wanted)
    assert days[0] == 1
    assert min(days[1:]) >= CHANGES


def halves(x, y, day, device):
    """No samples on day 3, a class that was not there before from day 4 on, and one that cannot be."""
    assert device in (0, 1)
    if day == 3:
        return x[:0], y[:0]
    return (x, np.full_like(y, 9)) if day == 4 else (x, np.full_like(y, 11))


def test_an_empty_day_a_new_class_and_one_that_cannot_be_stop_nothing(tmp_path):
    change = {"kind": f"{__name__}:halves", "day": 3}
    summary, _, nights = play(tmp_path / "a", growing(arrivals={"change": change}))
    assert nights == [1, 1, 1, 2, 3, 4, 5]
    scores = [day.score for day in summary.days]
    assert scores[2] is None, "nothing came"
    assert scores[3] is not None
    assert scores[4] is None, "nothing came that the model could know"
    count, refused = looked_at(tmp_path / "a" / "devices" / "device-1.samples.sqlite")
    assert count == 240 + 3 * 120
    assert refused == {"class": 120}


def test_a_device_that_cannot_begin_or_run_dry_is_told_in_one_line(tmp_path):
    for arrivals, match in (
        ({"first": 1}, r"data\.arrivals\.first = 1: device 0 has no training sample"),
        ({"per_day": 500}, r"data\.arrivals: device 0 has 8.. samples of digits, and 2740 are to come"),
        ({"change": {"kind": "dusk", "day": 2}}, "is none of rotate-classes, invert, shift"),
    ):
        with pytest.raises(SettingError, match=match) as caught:
            simulate(growing(arrivals=arrivals), tmp_path / "a", workers=0, fresh=True)
        assert "\n" not in str(caught.value)
    with pytest.raises(FleetuneError, match=r"set fleet\.days"):
        simulate(growing(fleet={"devices": 2}), tmp_path / "a", workers=0, fresh=True)


def test_what_comes_is_a_devices_own_part_each_sample_once():
    wanted = run_devices.with_model_shape(
        growing(arrivals={"per_day": None}), shares := PartitionedData.of_run(growing())
    )
    deliveries = ArrivalSchedule(wanted, shares)
    for index in range(2):
        taken = [
            deliveries.at_first(index),
            *(deliveries.of_delivery(index, n) for n in range(deliveries.num_deliveries)),
        ]
        count = sum(len(y) for _, y in taken)
        assert count == len(shares.rows(index)), "evenly over the days, until all are there"
        sizes = {len(y) for _, y in taken[1:]}
        assert max(sizes) - min(sizes) <= 1


def test_days_are_left_beside_the_rounds():
    days = [DaySummary(1, 0.5, rounds=2, devices={"device-0": 0.5}), DaySummary(2, None, rounds=2)]
    written = figures(Summary(method="fedavg", days=days), [])
    lines = [json.loads(line) for line in written["days.jsonl"].splitlines()]
    assert lines[0] == {"day": 1, "score": 0.5, "rounds": 2, "devices": {"device-0": 0.5}}
    assert json.loads(written["summary.json"])["days"] == lines
    assert "days.jsonl" not in figures(Summary(method="fedavg"), [])


def test_a_devices_clock_that_jumps_takes_no_sample(tmp_path):
    """It wakes up in 1970, finds the time, and is then ten years ahead."""
    keep = {"keep": {"keep_days": 3}}
    wanted = run_devices.with_model_shape(growing(arrivals=keep), shares := PartitionedData.of_run(growing()))
    devices = stream_devices(wanted, begin(wanted, tmp_path).enrolment, shares, tmp_path, None)
    today = 1_767_225_600.0
    devices.begin("board", 0, today)
    for turn, wall_s in enumerate([today + 21_600, 0.0, today + 43_200, today + 10 * 365 * 86_400]):
        devices.deliver("board", 0, turn, wall_s)
    assert looked_at(tmp_path / "board.samples.sqlite") == (240 + 4 * 30, {"clock": 3})
