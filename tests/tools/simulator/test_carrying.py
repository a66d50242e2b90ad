"""Simulated devices that go on from another run begin with the models that they serve there."""

import shutil
from dataclasses import replace

import pytest
from tests.tools.simulator.test_simulate import settings
from typer.testing import CliRunner

from fleetune.coordinator.run.enrolment import prepare
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.run_events import Notice
from fleetune.coordinator.run.stored_run import look_at
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, read_deployed
from fleetune.edge_agent.extensions.session_state import recall
from fleetune.protocols.errors import StoreError
from fleetune.protocols.methods import from_section
from fleetune.protocols.update import codec
from fleetune.tools.cli import app
from fleetune.tools.simulator import starting_models
from fleetune.tools.simulator.runner import simulate

SHAPE = {"input_shape": [1, 8, 8], "num_classes": 10}
NAMES = [f"device-{index}" for index in range(6)]


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of runs with a finished simulation, `sim`."""
    runs = tmp_path_factory.mktemp("runs")
    run, _ = simulate(personal(), runs / "sim", workers=0, fresh=True)
    run.store.close()
    return runs


@pytest.fixture
def runs(first, tmp_path):
    shutil.copytree(first, tmp_path / "runs")
    return tmp_path / "runs"


def personal(name="sim", *, final_evaluation=True, **model):
    return settings(
        run={"name": name, "rounds": 2, "final_evaluation": final_evaluation},
        model={**SHAPE, **model},
        method={"name": "fedper"},
        round={},
    )


class Heard(list):
    """Observes a run: the lines for people."""

    def observe(self, event):
        if isinstance(event, Notice):
            self.append(event.line)


def going_on(runs, name="next"):
    """What was said, and the devices' first models in a run that goes on from `sim`."""
    wanted, said = personal(name, weights="run:sim"), Heard()
    run, _ = simulate(wanted, runs / name, workers=0, fresh=True, observers=[said])
    run.store.close()
    return said, {device: starting_models.starting_model(runs / name / "devices", device) for device in NAMES}


def serve(runs, device, found, **changes):
    changed = DeployedModel(replace(found.record, **changes), found.weights)
    memory = starting_models.deployed_file(runs / "sim" / "devices", device)
    memory.write(codec.encode(changed, prepare(personal()).spec))


def served(runs, device, run="sim"):
    return read_deployed(starting_models.deployed_file(runs / run / "devices", device).read())


def test_each_device_begins_with_the_model_that_it_serves(runs):
    said, begun = going_on(runs)
    assert said == ["6 of 6 devices begin with their own models from run sim"]
    assert len({begun[device].tobytes() for device in NAMES}) == 6
    for device in NAMES:
        assert begun[device].tobytes() == served(runs, device).weights.tobytes()
    assert starting_models.state_file(runs / "next" / "devices", NAMES[0]).path.exists()


def test_what_the_session_keeps_is_not_written_twice_and_begins_the_next_run(tmp_path):
    """Without a final evaluation what each device serves is the personal model of its last round."""
    run, _ = simulate(personal(final_evaluation=False), tmp_path / "sim", workers=0, fresh=True)
    run.store.close()
    there, method = tmp_path / "sim" / "devices", from_section(run.enrolment.method, run.enrolment.spec)
    assert not list(there.glob("*.deployed"))
    said, begun = going_on(tmp_path)
    assert said == ["6 of 6 devices begin with their own models from run sim"]
    for device in NAMES:
        kept = recall(run.enrolment, method, starting_models.state_file(there, device))
        assert begun[device].tobytes() == method.personal_model(kept.state).tobytes()
        assert kept.slots["best_checkpoint"].round == 2
        assert served(tmp_path, device, "next").record.run.startswith("next-")


def test_a_damaged_session_is_one_line(tmp_path):
    run, _ = simulate(personal(final_evaluation=False), tmp_path / "sim", workers=0, fresh=True)
    run.store.close()
    file = starting_models.state_file(tmp_path / "sim" / "devices", NAMES[0])
    file.write(b"cut short")
    with pytest.raises(StoreError, match=rf"{NAMES[0]}\.state, .* is damaged .* remove the file"):
        going_on(tmp_path)


def test_what_was_served_before_is_served_until_there_is_something_better(runs):
    found = served(runs, NAMES[0])
    serve(runs, NAMES[0], found, training_loss=-1.0, validation_loss=-1.0, held_out=0.0)
    before = {
        device: starting_models.deployed_file(runs / "sim" / "devices", device).read() for device in NAMES
    }
    enrolment = prepare(personal("next", weights="run:sim"), runs)
    starting_models.carry_over(
        personal("next", weights="run:sim"), enrolment, NAMES, runs / "n" / "devices", runs
    )
    assert {
        name: starting_models.deployed_file(runs / "n" / "devices", name).read() for name in NAMES
    } == before
    going_on(runs)
    after = {
        device: starting_models.deployed_file(runs / "sim" / "devices", device).read() for device in NAMES
    }
    assert after == before  # one file under two names, never written in place


def test_who_took_no_part_or_serves_another_kind_of_model_begins_with_the_shared_one(runs):
    found = {device: served(runs, device) for device in NAMES}
    serve(runs, NAMES[0], found[NAMES[0]], run="an-earlier-one")  # and it took part
    serve(runs, NAMES[1], found[NAMES[1]], run="an-earlier-one")
    starting_models.state_file(runs / "sim" / "devices", NAMES[1]).path.unlink()
    serve(runs, NAMES[2], found[NAMES[2]], model="another")
    for kind in (starting_models.deployed_file, starting_models.state_file):
        kind(runs / "sim" / "devices", NAMES[3]).path.unlink()
    said, begun = going_on(runs)
    assert said == [
        "3 of 6 devices begin with their own models from run sim, the others with its shared model"
    ]
    own = [device for device, weights in begun.items() if weights is not None]
    assert own == [NAMES[0], NAMES[4], NAMES[5]]


def test_a_fleets_run_has_no_devices_models_and_the_simulation_says_so(tmp_path):
    open_run(personal(), tmp_path / "sim").store.close()
    said, begun = going_on(tmp_path)
    folder = tmp_path / "sim" / "devices"
    assert said == [
        f"all devices begin with the shared model of run sim: {folder} has no models of their own"
    ]
    assert set(begun.values()) == {None}


def test_a_run_that_goes_on_from_none_says_nothing(tmp_path):
    said = Heard()
    run, _ = simulate(personal(), tmp_path / "sim", workers=0, fresh=True, observers=[said])
    run.store.close()
    assert said == []


def test_a_damaged_model_is_named(runs):
    starting_models.deployed_file(runs / "sim" / "devices", NAMES[2]).path.write_bytes(b"damaged")
    with pytest.raises(
        StoreError, match=r"device-2\.deployed, the model that a device begins with, is damaged"
    ):
        going_on(runs)


def test_where_files_have_one_name_only_they_are_copied(runs, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr("pathlib.Path.hardlink_to", refuse)
    _, begun = going_on(runs)
    assert begun[NAMES[0]].tobytes() == served(runs, NAMES[0]).weights.tobytes()


def test_the_command_says_what_devices_begin_with(runs, tmp_path):
    (tmp_path / "next.toml").write_text(
        """
        [run]
        name = "next"
        rounds = 1
        [model]
        name = "mlp"
        weights = "run:sim"
        [method]
        name = "fedper"
        [data]
        source = "digits"
        partition = { kind = "dirichlet", alpha = 0.5, samples = 60, test_fraction = 0.5 }
        [fleet]
        devices = 7
        """
    )
    command = ["run", str(tmp_path / "next.toml"), "--runs", str(runs), "--workers", "0"]
    found = CliRunner().invoke(app, command)
    assert "6 of 7 devices begin with their own models from run sim, the others" in found.output, found


def test_a_new_version_of_the_model_keeps_its_layers_on_both_sides(runs, caplog):
    wanted, said = personal("next", weights="run:sim", num_classes=12), Heard()
    run, _ = simulate(wanted, runs / "next", workers=0, fresh=True, observers=[said])
    run.store.close()
    assert said == ["6 of 6 devices begin with their own models from run sim"]
    (line,) = (one.message for one in caplog.records if "another model" in one.message)
    assert line.startswith("another model than that of run sim: 2 of 3 layers keep their weights (")
    before, spec = prepare(personal()).spec, run.enrolment.spec
    head = list(spec.layers)[-1]
    with look_at(runs / "sim") as first:
        shared = first.controller.shared_model
    fresh = prepare(personal("fresh", num_classes=12)).weights
    for device in (None, *NAMES):
        old = shared if device is None else served(runs, device).weights
        new = (
            run.enrolment.weights
            if device is None
            else starting_models.starting_model(runs / "next" / "devices", device)
        )
        for tensor in spec.tensors:
            here = spec.slices[tensor.name]
            if tensor.layer == head:
                wanted = run.enrolment.weights[here]
                assert (wanted == fresh[here]).all()
            else:
                wanted = old[before.slices[tensor.name]]
            assert (new[here] == wanted).all(), (device, tensor.name)
