"""Simulated devices that choose what they can afford: boards, links, batteries, deadlines."""

import pytest

from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.tools.links.link import Constant
from fleetune.tools.simulator.device_specs import device_specs
from fleetune.tools.simulator.runner import simulate
from fleetune.tools.simulator.simulated_device import Battery

BASE = {
    "run": {"name": "sim", "rounds": 8},
    "model": {"name": "mlp"},
    "method": {"name": "fedspu"},
    "data": {
        "source": "digits",
        "partition": {"kind": "dirichlet", "alpha": 1.0, "samples": 60, "test_fraction": 0.5},
    },
    "training": {"epochs": 1, "batch_size": 10, "learning_rate": 0.1},
    "encoding": {"up": "raw", "down": "raw"},  # what a payload takes is then known before training
    "fleet": {"devices": 4, "boards": {"raspberry-pi-4b": 4}},
}
THIN = {"uplink_mbps": 0.02, "downlink_mbps": 1.0}


def settings(**sections):
    return parse_run(
        {name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {**BASE, **sections}}
    )


def play(tmp_path, name="a", **sections):
    run, summary = simulate(settings(**sections), tmp_path / name, workers=0, fresh=True)
    records = run.controller.records()
    run.store.close()
    return summary, records


def test_with_time_enough_every_device_takes_all_and_with_less_what_fits(tmp_path):
    ample, _ = play(tmp_path, "a", round={"deadline_s": 600}, fleet=THIN)
    tight, records = play(tmp_path, "b", round={"deadline_s": 6}, fleet=THIN)
    assert {p for ratios in ample.ratios.values() for p in ratios} == {1.0}
    assert all(0 < ratios[-1] < 1 for ratios in tight.ratios.values())
    assert all(record.closed_s - record.opened_s <= 6 for record in records[1:-1])
    assert tight.bytes.up < 0.6 * ample.bytes.up


def test_a_fixed_ratio_that_takes_too_long_is_late_and_a_chosen_one_is_not(tmp_path):
    deadline = {"deadline_s": 6, "quorum": 1}
    _, chosen = play(tmp_path, "a", round=deadline, fleet=THIN)
    assert all(len(record.devices) == 4 for record in chosen)
    slow_half = {**THIN, "ratios": [0.1, 1.0]}
    _, fixed = play(tmp_path, "b", round=deadline, fleet=slow_half)
    assert all(set(record.devices) == {"device-0", "device-2"} for record in fixed[:3])


def test_predictions_are_right_where_the_profile_is_and_are_learned_where_it_is_not(tmp_path):
    true, _ = play(tmp_path, "a")
    assert true.predicted_vs_actual["train_s"].overall.median < 1e-9
    off, _ = play(tmp_path, "b", fleet={"spread": 0.5}, run={"rounds": 6})
    errors = off.predicted_vs_actual["train_s"]
    assert errors.overall.worst_decile > 0.05
    assert errors.after_five_rounds.median < 0.01


def test_a_device_that_was_late_learns_to_take_less(tmp_path):
    """Its link is ten times as fast for a moment as it is from then on."""
    trace = tmp_path / "fading.csv"
    trace.write_text("time_s,uplink_bps,downlink_bps\n0,200000,1000000\n0.1,20000,1000000\n100000,0,0\n")
    _, records = play(
        tmp_path, round={"deadline_s": 6, "quorum": 1}, fleet={"links": {str(trace): 1}, **THIN}
    )
    taken = [record.devices["device-0"].ratio for record in records[1:-1] if "device-0" in record.devices]
    assert "device-0" not in records[0].devices
    assert taken
    assert max(taken) < 1


def test_a_battery_that_runs_out_takes_its_device_away(tmp_path):
    boards = {"phone-mid": 2, "raspberry-pi-4b": 2}
    fleet = {"devices": 4, "boards": boards, "batteries": [5e-4, 5e-4], **THIN}
    summary, records = play(tmp_path, fleet=fleet)
    assert summary.rounds == 8
    assert set(records[0].devices) == {f"device-{i}" for i in range(4)}
    assert set(records[7].devices) == {"device-2", "device-3"}


@pytest.mark.parametrize(("quorum", "flat"), [(1, 4), (3, 3)])
def test_a_run_whose_batteries_end_ends_and_says_so(tmp_path, quorum, flat):
    fleet = {"devices": 4, "boards": {"phone-mid": 4}, "batteries": [2e-4, 8e-4], **THIN}
    summary, records = play(tmp_path, fleet=fleet, round={"quorum": quorum}, run={"rounds": 1000})
    assert [len(record.devices) for record in records if not record.final_evaluation] == [4, 4, 3]
    assert summary.ended == f"the batteries of {flat} of 4 devices are empty, and round.quorum is {quorum}"


def test_the_owners_policy_holds_in_simulation(tmp_path):
    fleet = {"devices": 4, "boards": {"phone-mid": 2, "raspberry-pi-4b": 2}, "batteries": [0.1, 0.1]}
    _, records = play(tmp_path, fleet={**fleet, "policy": {"min_battery": 20}})
    assert set(records[0].devices) == {"device-2", "device-3"}
    with pytest.raises(
        SettingError, match=r"fleet.policy.min_batery: unknown key; did you mean `min_battery`"
    ):
        play(tmp_path, fleet={**fleet, "policy": {"min_batery": 20}})


def test_memory_that_no_ratio_fits_into_is_declined_with_the_figures(tmp_path):
    with pytest.raises(SettingError, match=r"no device can take part: nothing fits: .* MB of .* MB"):
        play(tmp_path, fleet={"policy": {"max_memory_mb": 80}})


def test_links_by_name_and_by_trace(tmp_path):
    trace = tmp_path / "outage.csv"
    trace.write_text("time_s,uplink_bps,downlink_bps\n0,20000,1000000\n2,0,0\n30,20000,1000000\n60,0,0\n")
    calm, _ = play(tmp_path, "a", fleet=THIN, run={"rounds": 2})
    broken, records = play(tmp_path, "b", fleet={"links": {str(trace): 4}}, run={"rounds": 2})
    assert broken.bytes.up == calm.bytes.up
    assert records[0].closed_s > 30
    asked = settings(fleet={"links": {"4g": 1}})
    devices = device_specs(asked.fleet, asked.run.seed)
    assert not isinstance(devices[0].link, Constant) or devices[0].link != devices[1].link


def test_a_battery_drains_by_work_and_by_time_and_never_below_nothing():
    battery = Battery(capacity_j=1000, charge=0.5, idle_w=2)
    battery.drain(now=50, joules=100)
    assert battery.charge == pytest.approx(0.3)
    battery.drain(now=40)  # a clock that goes back charges nothing
    assert battery.charge == pytest.approx(0.3)
    battery.drain(now=1e6)
    assert battery.is_empty
    assert battery.charge == 0
