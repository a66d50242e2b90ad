"""A backbone of int8 weights: what is kept, what travels, both trainers alike; without it nothing of it."""

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
from msgspec import UNSET
from safetensors.numpy import load
from tests import hostile
from tests.protocols.model.test_backbone import (
    HEAD,
    LORA,
    MODULE,
    UPPER_LORA,
    batch,
    frozen_of,
    net,
    run_of,
    section,
)

from fleetune.coordinator.export.make_bundle import make_run_model_bundle
from fleetune.coordinator.run.enrolment import begin
from fleetune.coordinator.spec.partial_training import described
from fleetune.edge_agent.training.trainers import make_backend
from fleetune.protocols.errors import PacketCorrupt, PacketForeign, SettingError
from fleetune.protocols.model.backbone_file import (
    backbone_file,
    backbone_file_bytes,
    held_bytes,
    read_backbone,
)
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import read_enrolment
from fleetune.protocols.wire.transfer import digest_of


@pytest.fixture(autouse=True)
def _module(monkeypatch):
    module = ModuleType(MODULE)
    module.net = net
    monkeypatch.setitem(sys.modules, MODULE, module)


def int8_of(part, seed=1):
    """A spec whose backbone is int8, its file's tensors, and the module with float32 ones."""
    spec, module = described(section(**part), Key(seed))
    backbone = replace(spec.backbone, weights="int8")
    file = backbone_file(backbone, frozen_of(module))
    spec = replace(spec, backbone=replace(backbone, digest=digest_of(file)))
    return spec, read_backbone(memoryview(bytearray(file)), spec.backbone), module


def test_weights_of_a_backbone_as_int8_are_the_nearest_multiples_of_their_channels_scale():
    spec, found, module = int8_of(HEAD)
    wanted = frozen_of(module)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        assert found[name].dtype == np.float32
        if values.ndim < 2:
            np.testing.assert_array_equal(found[name], values)
            continue
        most = np.abs(values).reshape(len(values), -1).max(1).reshape(-1, 1, 1, 1)
        assert (np.abs(found[name] - values) <= most / 254 * (1 + 1e-5)).all()
        assert (np.abs(found.weights[name].numbers).reshape(len(values), -1).max(1) == 127).all()
    zero = dict(wanted, **{"body.conv1.weight": np.zeros((6, 1, 3, 3), np.float32)})
    again = read_backbone(backbone_file(spec.backbone, zero), spec.backbone)
    np.testing.assert_array_equal(again["body.conv1.weight"], 0)


def test_a_file_with_int8_is_safetensors_of_a_quarter_of_the_size():
    spec, found, module = int8_of(HEAD)
    backbone = spec.backbone
    data = backbone_file(backbone, frozen_of(module))
    content = load(data)
    assert content["body.conv2.weight"].dtype == np.int8
    np.testing.assert_array_equal(content["body.conv2.weight"], found.weights["body.conv2.weight"].numbers)
    assert content["body.conv2.weight:scale"].shape == (8,)
    assert len(data) == backbone_file_bytes(backbone)
    sizes = [tensor.size for tensor in spec.frozen if len(tensor.shape) > 1]
    floats = backbone_file_bytes(replace(backbone, weights=UNSET))
    assert held_bytes(spec, as_stored=False) - held_bytes(spec, as_stored=True) == 3 * sum(sizes) - 4 * (
        6 + 8
    )
    assert floats > len(data)
    with pytest.raises(PacketForeign):
        read_backbone(data, replace(backbone, weights=UNSET))
    with pytest.raises(PacketCorrupt):
        read_backbone(data[:-1], backbone)


@pytest.mark.parametrize("part", [HEAD, LORA, UPPER_LORA])
def test_both_trainers_train_alike_on_an_int8_backbone_and_onnx_keeps_it_so(part):
    spec, frozen, _ = int8_of(part)
    bundle = make_run_model_bundle(section(**part), Key(1)).for_devices(spec)
    bundle.check_is_of(spec)
    torch_one = make_backend("torch", spec, None, 1, frozen=frozen)
    onnx_one = make_backend("onnx", spec, bundle, 1, frozen=frozen)
    assert onnx_one._tensors["body.conv1.weight:int8"] is frozen.weights["body.conv1.weight"].numbers
    assert "body.conv1.weight" not in onnx_one._tensors
    weights = np.random.default_rng(3).normal(size=spec.size).astype(np.float32) / 4
    uppers = [one.upper_layers() for one in (torch_one, onnx_one)]
    x, y = batch(1)
    answers, gradients = [], []
    for backend in (torch_one, onnx_one):
        backend.load(weights)
        backend.step(x, y, Key(2))
        gradients.append(backend.gradient.copy())
        answers.append(backend.answer(x, "logits"))
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-5, atol=1e-5)
    assert np.linalg.norm(gradients[0] - gradients[1]) <= 1e-5 * np.linalg.norm(gradients[0])
    for upper, backend in zip(uppers, (torch_one, onnx_one), strict=True):
        if upper is None:
            continue
        upper.backend.load(weights)
        np.testing.assert_allclose(
            upper.backend.answer(upper.features(x), "logits"), backend.answer(x, "logits"), atol=1e-5
        )
    whole = make_backend("torch", spec, None, 1, frozen={name: frozen[name] for name in frozen})
    whole.load(weights)
    whole.step(x, y, Key(2))
    np.testing.assert_array_equal(whole.gradient, gradients[0])


def test_a_run_says_that_its_backbone_is_int8_and_others_say_nothing_of_it():
    begun = {numbers: begin(run_of(trainable=["head"], backbone=numbers)) for numbers in ("float32", "int8")}
    plain = begin(run_of(trainable=["head"]))
    assert begun["float32"].backbone == plain.backbone
    body = hostile.body_of(codec.encode(plain.enrolment, plain.enrolment.spec))
    assert b"backbone\x83" in body  # tensors, adapters, digest, and nothing else
    assert b"int8" not in body
    spec = begun["int8"].enrolment.spec
    assert spec.backbone.weights == "int8"
    assert spec.hash != plain.enrolment.spec.hash
    read = read_enrolment(codec.encode(begun["int8"].enrolment, spec))
    assert read.spec == spec
    assert len(begun["int8"].backbone) < len(plain.backbone)
    with pytest.raises(SettingError, match=r"model.backbone: nothing is frozen that could be int8"):
        begin(run_of(backbone="int8"))
