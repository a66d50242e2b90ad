"""Real agents whose owners set conditions: they rest, they stop in mid-epoch, they come back."""

import msgspec
import pytest
from tests.helpers.fleet_processes import Fleet, run_toml
from typer.testing import CliRunner

from fleetune.coordinator.cli import app


def battery(root, status):
    """A board whose battery is `status`."""
    folder = root / "sys" / "class" / "power_supply" / "BAT0"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"type": "Battery", "present": "1", "capacity": "57", "status": status}.items():
        (folder / name).write_text(f"{content}\n")


@pytest.fixture
def board(tmp_path):
    root = tmp_path / "board"
    battery(root, "Discharging")
    return root


def conditions(board, *options):
    return ("--leave-after-run", "--root", str(board), *options)


def test_an_agent_rests_until_it_is_charged_and_the_coordinator_knows_why(tmp_path, board):
    with Fleet(tmp_path, run_toml(devices=1, start_with=1)) as fleet:
        fleet.start_coordinator()
        (device,) = fleet.shares
        agent = fleet.start_agent(device, options=conditions(board, "--charging-only"))
        agent.wait_for("not joining yet: declined: charging_only: the board runs on battery, 57 % charged")
        assert not agent.lines("training")
        battery(board, "Charging")
        fleet.wait_finished()
        assert fleet.summary()["rounds"] == 3


@pytest.mark.nightly
def test_an_agent_stops_in_mid_epoch_and_goes_on_when_it_may(tmp_path, board):
    battery(board, "Charging")
    with Fleet(tmp_path, run_toml(devices=1, start_with=1, rounds=1, epochs=4000)) as fleet:
        fleet.start_coordinator()
        (device,) = fleet.shares
        agent = fleet.start_agent(device, options=conditions(board, "--charging-only"))
        agent.wait_for("round 1: training")
        battery(board, "Discharging")
        agent.wait_for(r"round 1: declined: training stopped after \d+ of \d+ steps: charging_only: ")
        battery(board, "Charging")
        fleet.wait_finished()
        assert fleet.summary()["rounds"] == 1


@pytest.mark.nightly
def test_where_nothing_fits_into_memory_it_declines_with_the_figures(tmp_path):
    with Fleet(tmp_path, run_toml(devices=2, start_with=1, rounds=2)) as fleet:
        fleet.start_coordinator()
        small, large = fleet.shares
        agent = fleet.start_agent(small, options=("--leave-after-run", "--max-memory-mb", "100"))
        agent.wait_for(r"nothing fits: 0.1 would need \d+ MB of 100 MB")
        fleet.start_agent(large)
        fleet.wait_finished()
        assert set(fleet.outcome().rounds[0][3]) == {large}


@pytest.mark.nightly
def test_what_was_expected_and_what_happened_stand_side_by_side(tmp_path):
    with Fleet(tmp_path, run_toml(devices=2, start_with=2, rounds=7)) as fleet:
        fleet.start()
        fleet.wait_finished()
        errors = fleet.summary()["predicted_vs_actual"]
    for quantity in ("download_s", "train_s", "upload_s", "bytes_down", "bytes_up", "memory_bytes"):
        assert errors[quantity]["after_five_rounds"]["pairs"] == 4, quantity
    assert errors["bytes_up"]["after_five_rounds"]["median"] < 0.1
    assert fleet.summary()["joules"] is None or fleet.summary()["joules"] > 0


@pytest.mark.parametrize("minimise", ["time", "bytes"])  # with `bytes` messages are compact besides
def test_the_coordinator_proposes_what_agents_afford_also_after_it_was_killed(minimise, tmp_path):
    text = run_toml(devices=3, start_with=3, rounds=8).replace("ratios = [", "# ratios = [")
    with Fleet(tmp_path, text + f'[objective]\nminimise = "{minimise}"\n') as fleet:
        fleet.start_coordinator()
        modest, *others = fleet.shares
        fleet.start_agent(modest, options=("--leave-after-run", "--ratio", "0.3"))
        for device in others:
            fleet.start_agent(device)
        fleet.agents[modest].wait_for("round 3: training")
        fleet.coordinator.kill()
        fleet.start_coordinator()
        fleet.wait_finished()
        lines = (fleet.folder / "runs" / fleet.name / "rounds.jsonl").read_bytes().splitlines()
        said = CliRunner().invoke(app, ["explain", str(fleet.folder / "runs" / fleet.name)]).output
    rounds = [msgspec.json.decode(line)["devices"] for line in lines]
    used = {device: {one[device]["ratio"] for one in rounds[:8]} for device in fleet.shares}
    assert max(used[modest]) <= 0.3
    assert f"minimise {minimise}" in said
    if minimise == "bytes":
        told = [device["actual"].get("left_out") for one in rounds[:8] for device in one.values()]
        assert any(share is not None and 0 < share < 1 for share in told), "thin updates leave something"
        assert "compression error" in said
    if minimise == "time":
        assert len(set.union(*used.values())) > 1
        assert "the target round duration is" in said
