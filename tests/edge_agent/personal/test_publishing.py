"""The file that an app reads: always whole, always what is served, through power cuts and rollbacks."""

import itertools
import os
import stat
from dataclasses import replace

import numpy as np
import pytest
from tests.helpers.linear_bundle import SPEC, bundle
from tests.helpers.power import ForgetfulDisk, PowerCut
from typer.testing import CliRunner

from fleetune.edge_agent.cli import app
from fleetune.edge_agent.extensions.adoption.deployed_model import DeployedModel, ModelRecord
from fleetune.edge_agent.personal.inference_graph import Predictor
from fleetune.edge_agent.personal.publishing import Publisher, publisher_of
from fleetune.edge_agent.starting import _mode
from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.deployed_files import DeployedFiles
from fleetune.edge_agent.state.state_folder import agent_files
from fleetune.protocols.errors import SettingError
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment

STANDING = ModelRecord("r-1", 1, final_evaluation=False, model=SPEC.hash, input_shape=(2,), num_classes=3)


def weights(number):
    """The likeliest label is `number`, whatever the input."""
    return np.r_[np.zeros(6), np.eye(3)[number]].astype(np.float32)


def serve(store, number):
    """As version `number + 1`."""
    files = DeployedFiles.next_to(store.deployed)
    record = replace(STANDING, round=number + 1, version=number + 1)
    data = codec.encode(DeployedModel(record, weights(number)), SPEC)
    files.version(number + 1).write(data)
    store.deployed.write(data)


def answer(path):
    return int(Predictor.of(path).probabilities(np.ones((1, 2), np.float32)).argmax())


def joined(store):
    """A device's store, once it has joined run r-1."""
    zeros = np.zeros(SPEC.size, np.float32)
    method = {"name": "fedavg"}
    enrolment = Enrolment("r-1", 0, SPEC, method, TrainingSection(), 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, zeros)
    store.enrolment("r-1").write(codec.encode(enrolment, SPEC))
    store.keep_bundle("r-1", bundle().encoded())
    return store


@pytest.fixture
def store(tmp_path):
    (tmp_path / "disk").mkdir()
    return joined(AgentStore(tmp_path / "disk" / "state" / "f" / "d"))


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_the_file_is_as_the_umask_says_or_as_its_owner_does(store, tmp_path):
    path, before = tmp_path / "app" / "model.onnx", os.umask(0o027)
    try:
        serve(store, 0)
        publisher_of(store, "d", path, ())
        assert mode(path) == 0o640
        assert mode(path.parent) == 0o750
        publisher_of(store, "d", None, (), 0o604)  # the path is as before
        assert mode(path) == 0o604
        serve(store, 1)
        again = publisher_of(store, "d", None, ())  # a restart without the option: both are as before
        assert (mode(path), answer(path), again.path) == (0o604, 1, path)
        publisher_of(store, "d", tmp_path / "other.onnx", ())
        assert mode(tmp_path / "other.onnx") == 0o604
        assert {mode(one) for one in store.folder.rglob("*") if one.is_file()} == {0o600}
    finally:
        os.umask(before)


@pytest.mark.parametrize("text", ["rw", "0240", "77777", "-0640", "888"])
def test_a_mode_that_is_none_is_one_line(text):
    with pytest.raises(SettingError, match=r"three octal digits.*0640"):
        _mode(text)


def test_the_app_gets_what_is_served_whenever_it_changes(store, tmp_path, caplog):
    path, publisher = tmp_path / "app" / "model.onnx", Publisher(store, "d")
    publisher.refresh()
    assert not path.exists()  # nobody wants one
    publisher.publish_to(path)
    publisher.refresh()
    assert not path.exists()  # nothing is served yet
    for number in (0, 1, 2):
        serve(store, number)
        publisher.refresh()
        assert answer(path) == number
    written = path.stat().st_mtime_ns
    publisher.refresh()
    Publisher(store, "d").refresh()  # a restart
    assert path.stat().st_mtime_ns == written
    path.write_bytes(b"half of")
    Publisher(store, "d").refresh()
    assert answer(path) == 2
    assert Predictor.of(path).session.get_modelmeta().custom_metadata_map["version"] == "3"
    store.claim().close()
    (found,) = agent_files(store.folder)
    assert found.foreign == ()


@pytest.mark.parametrize(
    ("arguments", "wanted"), [(["rollback"], 1), (["rollback", "1"], 0), (["pin", "2"], 1)]
)
def test_rollback_and_pin_change_the_file_too_though_no_agent_runs(store, tmp_path, arguments, wanted):
    path, publisher = tmp_path / "model.onnx", Publisher(store, "d")
    publisher.publish_to(path)
    for number in (0, 1, 2):
        serve(store, number)
    publisher.refresh()
    own = ["--fleet", "f", "--device", "d", "--state", str(tmp_path / "disk" / "state")]
    result = CliRunner().invoke(app, [*arguments, *own])
    assert result.exit_code == 0, result.output
    assert answer(path) == wanted


def test_what_is_in_the_way_is_one_line_and_the_file_stays(store, tmp_path, caplog):
    path, publisher = tmp_path / "model.onnx", Publisher(store, "d")
    publisher.publish_to(path)
    serve(store, 0)
    publisher.refresh()
    serve(store, 1)
    for file in (store.folder / "bundles").iterdir():
        file.unlink()
    publisher.refresh()
    assert answer(path) == 0
    (said,) = [one.message for one in caplog.records if one.levelname == "WARNING"]
    assert said.startswith("the deployed model is not published: ")
    assert "no bundle of run r-1 is here" in said
    store.keep_bundle("r-1", bundle().encoded())
    publisher.refresh()
    assert answer(path) == 1


def test_a_power_cut_anywhere_leaves_a_whole_file_and_the_next_start_the_right_one(store, tmp_path):
    disk, path = tmp_path / "disk", tmp_path / "disk" / "model.onnx"
    Publisher(store, "d").publish_to(path)
    serve(store, 0)
    Publisher(store, "d").refresh()
    cuts = 0
    for at in itertools.count(0, 0.5):
        power = ForgetfulDisk(disk, 0)
        power.cut_at, number = at, 1 + cuts % 2
        before = answer(path)
        try:
            with power.in_place():
                serve(store, number)
                Publisher(store, "d").refresh()
            break
        except PowerCut:
            power.cut()
        cuts += 1
        assert answer(path) in (before, number)
        serve(store, number)
        Publisher(store, "d").refresh()
        assert answer(path) == number
    assert cuts > 20
