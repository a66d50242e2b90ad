"""A fleet's second day: more rounds for a finished run, and a run that starts from another; agents stay."""

from dataclasses import replace

import pytest
from safetensors.numpy import load_file
from tests.helpers.fleet_processes import Fleet, assert_equal, run_toml, simulated, wait_until
from tests.helpers.nightly import sooner

from fleetune.coordinator.run.stored_run import look_at
from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
from fleetune.tools.simulator import starting_models

pytestmark = pytest.mark.fleet


def test_agents_that_stayed_play_more_rounds_and_a_run_that_starts_from_the_first(tmp_path):
    with Fleet(tmp_path, run_toml(rounds=1)) as fleet:
        fleet.start(options=())
        assert fleet.coordinator.wait() == 0
        folder = tmp_path / "runs" / fleet.name
        with look_at(folder) as run:
            name, first = run.enrolment.run, run.controller.records()[0]
        for rounds in (2, 4):
            fleet.run_file.write_text(run_toml(rounds=rounds))
            assert fleet.start_coordinator().wait() == 0
            assert fleet.coordinator.lines(f"run {name} goes on")
            with look_at(folder) as run:
                records = run.controller.records()
            assert [record.number for record in records] == list(range(1, rounds + 2))
            assert records[0] == first
            assert all(record.devices for record in records)
            lines = (folder / "rounds.jsonl").read_bytes().splitlines()
            assert len(lines) == rounds + 1
        shared = load_file(folder / "models" / "shared.safetensors")
        wanted = run_toml(name="second", rounds=1).replace(
            'name = "mlp"', f'name = "mlp"\nweights = "run:{fleet.name}"'
        )
        fleet.run_file.write_text(wanted)
        assert fleet.start_coordinator("--fleet", fleet.name).wait() == 0
        with look_at(tmp_path / "runs" / "second") as run:
            assert run.enrolment.continues == name
            started = {tensor.name: view for tensor, view in run.enrolment.spec.views(run.enrolment.weights)}
            assert len(run.controller.records()[0].devices) == 3
        assert all((started[key] == value).all() for key, value in shared.items())
        for agent in fleet.agents.values():
            wait_until(lambda agent=agent: len(agent.lines("joined run")) == 4, "each run is joined anew")
            assert not agent.lines("ERROR")
            assert agent.stop() == 0


@pytest.mark.parametrize("method", sooner(["fedper", "fedspu"]))
def test_a_run_that_goes_on_from_another_is_its_simulation(tmp_path, tmp_path_factory, method):
    first = run_toml(method=method, rounds=2)
    second = going_on("second", "fleet", method=method)
    third = going_on("third", "second", method=method)  # what a device serves may be of the first run still
    runs = tmp_path_factory.mktemp("simulated")
    wanted = {toml: simulated(toml, runs / name) for toml, name in ((first, "fleet"), (second, "second"))}
    wanted[third] = simulated(third, runs / "third")
    with Fleet(tmp_path, first) as fleet:
        fleet.start(options=())
        assert fleet.coordinator.wait() == 0
        assert_equal(fleet.outcome(), wanted[first])
        for toml, name in (second, "second"), (third, "third"):
            fleet.run_file.write_text(toml)
            assert fleet.start_coordinator("--fleet", fleet.name).wait() == 0
            assert_equal(fleet.outcome(name), wanted[toml])
        for agent in fleet.agents.values():
            assert len(agent.lines("with this device's own model")) == 2
            assert agent.stop() == 0
        for device, found in fleet.served_models().items():
            there = read_deployed(starting_models.deployed_file(runs / "third" / "devices", device).read())
            assert found.weights.tobytes() == there.weights.tobytes()
            assert but_for_ids(found.record) == but_for_ids(there.record)


def going_on(name, before, **options):
    """A run.toml of a run that starts from another."""
    toml = run_toml(name=name, rounds=1, **options)
    return toml.replace('name = "mlp"', f'name = "mlp"\nweights = "run:{before}"')


def but_for_ids(record):
    """Ids of runs are drawn anew."""
    return replace(record, run=record.run.rpartition("-")[0])
