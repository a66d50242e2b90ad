"""A fleet's second day: more rounds for a finished run, and a run that starts from another; agents stay."""

import pytest
from safetensors.numpy import load_file

from coordinator.runs import look_at
from tests.fleet import Fleet, run_toml, wait_until

pytestmark = pytest.mark.fleet


def test_agents_that_stayed_play_more_rounds_and_a_run_that_starts_from_the_first(tmp_path):
    with Fleet(tmp_path, run_toml(rounds=1)) as fleet:
        fleet.start(options=())
        assert fleet.coordinator.wait() == 0
        folder = tmp_path / "runs" / fleet.name
        with look_at(folder) as run:
            name, first = run.enrolment.run, run.conductor.records()[0]
        for rounds in (2, 4):
            fleet.run_file.write_text(run_toml(rounds=rounds))
            assert fleet.start_coordinator().wait() == 0
            assert fleet.coordinator.lines(f"run {name} goes on")
            with look_at(folder) as run:
                records = run.conductor.records()
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
            assert len(run.conductor.records()[0].devices) == 3
        assert all((started[key] == value).all() for key, value in shared.items())
        for agent in fleet.agents.values():
            wait_until(lambda agent=agent: len(agent.lines("joined run")) == 4, "each run is joined anew")
            assert not agent.lines("ERROR")
            assert agent.stop() == 0
