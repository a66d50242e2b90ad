"""Every file that a user or another program supplies is opened by `protocols.input_files`."""

import os
import re

import pytest
from tests.helpers.places import ROOT
from typer.testing import CliRunner

from fleetune.coordinator.cli import app as coordinator
from fleetune.coordinator.run.models import read_bundle_file
from fleetune.coordinator.run.weights_file import read_weights
from fleetune.edge_agent.budget.owner_policy import read_policy
from fleetune.edge_agent.datasets.npy_arrays import read_npy
from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.joining.certificate import validity_of_file
from fleetune.edge_agent.personal.inference_graph import Predictor
from fleetune.edge_agent.probes.board_profile import board_named
from fleetune.protocols.errors import FleetuneError
from fleetune.protocols.settings.run_toml import read_run
from fleetune.tools.cli import app as simulator
from fleetune.tools.links.trace_csv import read_trace


def load_idx(path):
    path.rename(path.with_name("train-images-idx3-ubyte"))
    load(f"idx:{path.parent}")


def load_cifar(path):
    for name in ("test_batch.bin", *(f"data_batch_{i}.bin" for i in range(1, 6))):
        path.with_name(name).write_bytes(bytes(3073))
    path.replace(path.with_name("data_batch_1.bin"))
    load(f"cifar:{path.parent}")


def load_har(path):
    signals = path.parent / "train" / "Inertial Signals"
    signals.mkdir(parents=True)
    path.rename(signals / "body_acc_x_train.txt")
    load(f"har:{path.parent}")


def load_sounds(path):
    (path.parent / "1").mkdir()
    path.rename(path.parent / "classes.txt")
    (path.parent / "1" / "a.wav").write_bytes(b"")
    load(f"audio:{path.parent}")


READERS = {
    "run.toml": read_run,
    "policy": lambda path: read_policy(path, {}),
    "board": lambda path: board_named(str(path)),
    "csv": lambda path: load(f"csv:{path}?label=y"),
    "npz": lambda path: load(f"npz:{path}"),
    "npy": read_npy,
    "idx": load_idx,
    "cifar": load_cifar,
    "har": load_har,
    "classes": load_sounds,
    "weights": read_weights,
    "bundle": read_bundle_file,
    "predictor": Predictor.of,
    "certificate": validity_of_file,
    "trace": read_trace,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, r"is a named pipe \(FIFO\); expected a regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "is a device; expected a regular file"),
    ],
)
def test_a_pipe_and_a_device_are_one_line(tmp_path, read, make, words):
    path = tmp_path / "given"
    make(path)
    with pytest.raises(FleetuneError, match=words) as refused:
        read(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("app", "command"), [(coordinator, "serve"), (simulator, "run")], ids=["serve", "sim"]
)
@pytest.mark.parametrize(
    "text", [None, "x = " + "[" * 200_000, "x = " + "9" * 10_000], ids=["pipe", "deep", "long"]
)
def test_a_command_says_what_is_wrong_with_its_run_toml_in_one_line(
    tmp_path, monkeypatch, app, command, text
):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.toml"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text)
    result = CliRunner().invoke(app, [command, str(path)])
    assert result.exit_code == 2
    assert str(path) in result.output
    assert len(result.output.splitlines()) == 1


ELSEWHERE = re.compile(r"tomllib\.load|np\.load\(|numpy\.load\(|zipfile\.ZipFile\(|gzip\.open\(")
ALLOWED = {
    "protocols/toml_text.py",
    "firmware_profiles/schema.py",  # knows nothing of protocols, and is given text that was checked
    "edge_agent/datasets/npy_arrays.py",
    "coordinator/run/weights_file.py",  # looks into an archive that open_input has opened
}


def test_no_other_module_opens_what_users_supply():
    found = {
        str(path.relative_to(ROOT))
        for room in ("protocols", "coordinator", "edge_agent", "firmware_profiles")
        for path in (ROOT / room).rglob("*.py")
        if ELSEWHERE.search(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED
