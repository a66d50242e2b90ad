"""Joining a run: what a device refuses, and why."""

from pathlib import Path

import numpy as np
import pytest

from coordinator.enrol import prepare
from edge_agent.participation import DeviceSettings, join
from edge_agent.store import AgentStore
from protocols import codec
from protocols.errors import FleetuneError
from protocols.payloads import Enrolment
from protocols.settings import parse_run

USER_MODEL = "usermodel:two_layers"


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    (tmp_path / "usermodel.py").write_text(
        "from torch import nn\n"
        "def two_layers(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def enrolment(**sections) -> Enrolment:
    content = {
        "run": {"name": "r"},
        "model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 10},
        "method": {"name": "fedspu"},
    }
    return prepare(parse_run({**content, **sections}))


def joined(enrolled: Enrolment, folder: Path, **settings):
    device = DeviceSettings(fleet="f", device="d", data="digits", state=folder, **settings)
    data = codec.encode(enrolled, enrolled.spec)
    return join(device, AgentStore(folder), enrolled.run, data, stop=lambda: None, progress=lambda _: None)


def refusal(enrolled: Enrolment, folder: Path, **settings) -> str:
    with pytest.raises(FleetuneError) as caught:
        joined(enrolled, folder, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_device_starts_from_the_fleets_model_with_its_boards_ratio(tmp_path):
    enrolled = enrolment()
    taken = joined(enrolled, tmp_path, board="raspberry-pi-3b-plus")
    assert np.array_equal(taken.session.personal_model, enrolled.weights)
    assert taken.report.ratio == 0.4
    assert taken.report.num_samples > 1000


def test_the_owners_wish_comes_before_the_boards(tmp_path):
    assert joined(enrolment(), tmp_path, board="raspberry-pi-3b-plus", ratio=0.7).report.ratio == 0.7


def test_code_is_imported_only_from_modules_the_owner_trusts(tmp_path, user_code):
    model = {"model": {"name": USER_MODEL, "input_shape": [1, 8, 8], "num_classes": 10}}
    assert "--trust usermodel allows it" in refusal(enrolment(**model), tmp_path)
    assert "--trust usermodel" in refusal(enrolment(**model), tmp_path, trusted=("user", "usermodel.x"))
    assert joined(enrolment(**model), tmp_path, trusted=("usermodel",)).report.num_samples > 1000


def test_a_method_of_the_coordinators_own_is_not_imported_either(tmp_path):
    enrolled = enrolment()
    foreign = codec.decode(codec.encode(enrolled, enrolled.spec), Enrolment, enrolled.spec)
    foreign.method["name"] = "os:getcwd"
    assert "--trust os allows it" in refusal(foreign, tmp_path)


@pytest.mark.parametrize(
    ("sections", "settings", "message"),
    [
        ({"model": {"name": "mlp", "input_shape": [1, 8, 8], "num_classes": 5}}, {}, "the model has 0..4"),
        (
            {"model": {"name": "mlp", "input_shape": [1, 9, 9], "num_classes": 10}},
            {},
            "the model takes (1, 9, 9)",
        ),
        ({"round": {"deadline_s": 1e-6}}, {"board": "raspberry-pi-zero-2w"}, "nothing fits"),
        ({}, {"board": "raspberry-pi-9"}, "no board 'raspberry-pi-9'"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(tmp_path, sections, settings, message):
    enrolled = enrolment(**sections)
    assert message in refusal(enrolled, tmp_path, **settings)


def test_a_coordinator_without_the_models_shape_says_what_to_write():
    with pytest.raises(FleetuneError, match=r"model.input_shape and model.num_classes are missing"):
        enrolment(model={"name": "mlp"})
