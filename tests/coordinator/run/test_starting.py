"""What a run starts from: another run's shared model, or a safetensors file."""

from contextlib import closing
from dataclasses import replace as replace_fields
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file
from tests.conftest import tiny_spec
from tests.helpers.errors import raises
from tests.tools.simulator.test_simulate import settings
from typer.testing import CliRunner

from fleetune.coordinator.cli import app
from fleetune.coordinator.run.enrolment import prepare
from fleetune.coordinator.run.models import Model
from fleetune.coordinator.run.open_or_resume import open_run
from fleetune.coordinator.run.starting_weights import start_of
from fleetune.coordinator.run.stored_run import look_at, save_shared_model
from fleetune.protocols.errors import FleetuneError, ModelError, SettingError
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.tools.cli import app as simulator
from fleetune.tools.simulator.runner import simulate

SHAPE = {"input_shape": [1, 8, 8], "num_classes": 10}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """The folder of runs with a finished one, `sim`."""
    runs = tmp_path_factory.mktemp("runs")
    run, _ = simulate(settings(), runs / "sim", workers=0, fresh=True)
    run.store.close()
    return runs


def starting_from(weights, **sections):
    return settings(
        run={"name": "next", **sections.pop("run", {})}, model={**SHAPE, "weights": weights}, **sections
    )


def tiny_model(start=0.25):
    spec = tiny_spec()
    return Model(spec, np.full(spec.size, start, np.float32), 1.0, 1.0, None)


def tiny_settings(weights):
    return parse_run(
        {
            "run": {"name": "r"},
            "model": {"name": "tiny", "weights": str(weights)},
            "method": {"name": "fedavg"},
        }
    )


def tiny_tensors(value=0.5):
    return {tensor.name: np.full(tensor.shape, value, np.float32) for tensor in tiny_spec().tensors}


def read(path, model=None):
    return start_of(tiny_settings(path), model or tiny_model(), path.parent).weights


def test_a_run_starts_from_the_shared_model_of_another_and_says_so(first):
    with look_at(first / "sim") as run:
        weights, name = run.controller.shared_model, run.enrolment.run
    enrolment = prepare(starting_from("run:sim"), first)
    assert enrolment.weights.tobytes() == weights.tobytes()
    assert enrolment.continues == name
    drawn = prepare(replace(starting_from("x"), model=replace(starting_from("x").model, weights=None)), first)
    assert drawn.continues is None
    assert drawn.weights.tobytes() != weights.tobytes()


def test_a_saved_model_is_started_from_bit_for_bit_and_belongs_to_no_run(first, tmp_path):
    assert CliRunner().invoke(app, ["weights", str(first / "sim"), str(tmp_path / "w")]).exit_code == 0
    from_file = prepare(starting_from(str(tmp_path / "w")), first)
    from_run = prepare(starting_from("run:sim"), first)
    assert from_file.weights.tobytes() == from_run.weights.tobytes()
    assert from_file.continues is None


def test_a_served_and_a_simulated_run_start_from_the_same_bits(first):
    wanted = starting_from("run:sim")
    simulated, _ = simulate(wanted, first / "next", workers=0, fresh=True)
    with closing(simulated.store), closing(open_run(wanted, first / "served").store):
        pass
    with look_at(first / "served") as served:
        assert served.enrolment.weights.tobytes() == simulated.enrolment.weights.tobytes()
        assert served.enrolment.continues == simulated.enrolment.continues


def test_once_begun_a_run_no_longer_needs_what_it_started_from(first, tmp_path):
    save_file(load_file(_saved(first, tmp_path)), tmp_path / "gone")
    wanted = starting_from(str(tmp_path / "gone"))
    before = open_run(wanted, tmp_path / "run")
    before.store.close()
    (tmp_path / "gone").unlink()
    with closing(open_run(wanted, tmp_path / "run").store):
        pass
    with look_at(tmp_path / "run") as again:
        assert again.enrolment.weights.tobytes() == before.enrolment.weights.tobytes()


def _saved(runs, folder):
    with look_at(runs / "sim") as run:
        return save_shared_model(run, folder / "shared.safetensors")


def test_running_statistics_are_saved_and_taken_over(tmp_path):
    save_file(tiny_tensors(), tmp_path / "w")
    assert (read(tmp_path / "w") == 0.5).all()


def test_a_file_without_statistics_as_earlier_releases_saved_it_is_read(tmp_path):
    spec, tensors = tiny_spec(), tiny_tensors()
    save_file({name: one for name, one in tensors.items() if "running" not in name}, tmp_path / "w")
    weights = read(tmp_path / "w")
    assert (weights[: spec.num_parameters] == 0.5).all()
    assert (weights[spec.num_parameters :] == 0.25).all()


def test_files_as_torch_saves_them_are_read(tmp_path):
    tensors = {**tiny_tensors(), "n.num_batches_tracked": np.array(7, np.int64)}
    tensors["a.weight"] = tensors["a.weight"].astype(np.float16)
    tensors["b.bias"] = tensors["b.bias"].astype(np.float64)
    save_file(tensors, tmp_path / "w")
    assert (read(tmp_path / "w") == 0.5).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"b.weight": None}, "has no tensor b.weight, which tiny has"),
        ({"b.weight": np.zeros((4, 6), np.float32)}, "tensor b.weight is (4, 6); the model has (3, 6)"),
        ({"n.running_mean": np.zeros(5, np.float32)}, "tensor n.running_mean is (5,); the model has (6,)"),
        ({"c.weight": np.zeros((2, 2), np.float32)}, "tensor c.weight (4 values) is not in tiny"),
        ({"a.bias": np.full(6, np.nan, np.float32)}, "tensor a.bias holds NaN or infinite values"),
        ({"a.bias": np.full(6, 1e300)}, "tensor a.bias holds NaN or infinite values"),
        ({"a.bias": np.zeros(6, np.int64)}, "tensor a.bias is int64; save it as float32"),
    ],
)
def test_what_does_not_fit_is_one_line_that_names_the_tensor(tmp_path, change, said):
    tensors = {**tiny_tensors(), **change}
    save_file({name: one for name, one in tensors.items() if one is not None}, tmp_path / "w")
    with pytest.raises(ModelError) as caught:
        read(tmp_path / "w")
    assert said in str(caught.value)
    assert str(caught.value).startswith("model.weights: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ("run:sim", None),
        ("run:next", "model.weights: run next cannot start from itself"),
        ("run:nobody", "holds no run"),
        ("run:../sim", "is no name of a run"),
        ("nothing.safetensors", "cannot read nothing.safetensors"),
        (__file__, "is no safetensors file and no file of torch.save, or damaged"),
    ],
)
def test_where_nothing_can_be_started_from_is_one_line(first, weights, said):
    if said is None:
        wanted = starting_from(weights, method={"name": "fedavg"})
        wanted = replace(wanted, model=replace(wanted.model, name="lenet5", input_shape=(1, 28, 28)))
        said = "model.weights: run sim has no layer that lenet5 has, by name and shapes"
    else:
        wanted = starting_from(weights)
    with pytest.raises((ModelError, SettingError)) as caught:
        prepare(wanted, first)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def torch_file(path, changes=None, wrap=lambda state: state):
    torch = pytest.importorskip("torch")
    state = {
        name: torch.from_numpy(np.asarray(one)) for name, one in (tiny_tensors() | (changes or {})).items()
    }
    torch.save(wrap(state), path)
    return path


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"epoch": 3, "state_dict": state},
        lambda state: {f"module.{name}": one for name, one in state.items()},
        lambda state: {name: one.bfloat16() for name, one in state.items()},
    ],
    ids=["plain", "checkpoint", "parallel", "bfloat16"],
)
def test_a_state_dict_of_torch_is_read(tmp_path, wrap):
    path = torch_file(tmp_path / "w.pt", {"n.num_batches_tracked": np.array(7)}, wrap)
    assert (read(path) == 0.5).all()


class Code:
    def __reduce__(self):
        return (pytest.fail, ("the file's code ran",))


@pytest.mark.parametrize("wrap", [lambda _: Code(), lambda _: [1, 2], lambda _: {"lr": 0.1}])
def test_a_torch_file_without_a_state_dict_runs_nothing_and_is_refused(tmp_path, wrap):
    with raises(ModelError, "w.pt", remedy="torch.save"):
        read(torch_file(tmp_path / "w.pt", wrap=wrap))


def test_a_damaged_torch_file_is_one_line(tmp_path):
    path = torch_file(tmp_path / "w.pt")
    path.write_bytes(path.read_bytes()[:-200])
    with raises(ModelError, "w.pt"):
        read(path)


def test_a_packed_torch_file_is_refused_before_it_unpacks(tmp_path):
    whole = torch_file(tmp_path / "w.pt", {"a.weight": np.zeros((4000, 1000), np.float32)})
    with ZipFile(whole) as read_from, ZipFile(tmp_path / "p.pt", "w", ZIP_DEFLATED) as packed:
        for one in read_from.infolist():
            packed.writestr(one.filename, read_from.read(one))
    with raises(ModelError, "p.pt", "would unpack to 16,", remedy="torch.save"):
        read(tmp_path / "p.pt")


def test_bfloat16_of_safetensors_is_read(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    state = {name: torch.from_numpy(np.asarray(one)) for name, one in tiny_tensors().items()}
    state["a.weight"] = state["a.weight"].bfloat16()
    save_torch(state, tmp_path / "w")
    assert (read(tmp_path / "w") == 0.5).all()


def test_buffers_and_tied_names_of_the_models_code_may_be_in_the_file(tmp_path):
    table = np.arange(3)
    model = replace_fields(tiny_model(), buffers={"ids": table}, tied={"z.weight": "b.weight"})
    tied = tiny_tensors()["b.weight"]
    assert (read(torch_file(tmp_path / "w", {"ids": table, "z.weight": tied}), model) == 0.5).all()
    only_second = {**tiny_tensors(), "z.weight": tied}
    del only_second["b.weight"]
    save_file(only_second, tmp_path / "second")
    assert (read(tmp_path / "second", model) == 0.5).all()
    with raises(ModelError, "buffer ids"):
        read(torch_file(tmp_path / "w", {"ids": table + 1}), model)
    with raises(ModelError, "b.weight", "z.weight"):
        read(torch_file(tmp_path / "w", {"z.weight": tied + 1}), model)


def test_a_folder_in_place_of_a_file_is_one_line(tmp_path):
    with pytest.raises(FleetuneError) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_comparison_finds_the_run_beside_it(first):
    run = first / "compared.toml"
    run.write_text(
        '[run]\nname = "compared"\nrounds = 1\n[model]\nname = "mlp"\nweights = "run:sim"\n'
        '[method]\nname = "fedavg"\n[data]\nsource = "digits"\npartition = { kind = "iid", samples = 40 }\n'
        "[fleet]\ndevices = 2\n"
    )
    options = ["--runs", str(first), "--methods", "fedavg", "--workers", "0"]
    result = CliRunner().invoke(simulator, ["compare", str(run), *options])
    assert result.exit_code == 0, result.output
    assert (first / "compared.compare" / "fedavg" / "seed-0" / "summary.json").is_file()
