"""[data] mean and std, one number for all or one a channel, from run.toml to a device's exported model."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fleetune.coordinator.run.enrolment import prepare
from fleetune.coordinator.run.models import find_model
from fleetune.edge_agent.personal.inference_graph import Predictor, write_inference
from fleetune.edge_agent.training.device_data import DeviceData, scaled
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.errors import PacketCorrupt, PacketError, SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.run_toml import parse_run
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Enrolment

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]


def run(**data):
    model = {"name": "lenet5", "input_shape": [3, 32, 32], "num_classes": 10}
    return parse_run({"run": {"name": "r"}, "model": model, "method": {"name": "fedavg"}, "data": data})


def samples(x):
    y = np.zeros(len(x), np.int64)
    return DeviceData(x, y, x[:0], y[:0], x, y)


def test_an_exported_model_takes_raw_samples_of_three_channels():
    model = find_model(run(mean=MEAN, std=STD))
    images = (Key(1).uniform(5 * 3 * 32 * 32) * 256).astype(np.uint8).reshape(5, 3, 32, 32)
    data = scaled(samples(images), model.bundle.mean, model.bundle.std, model.spec)
    backend = OnnxBackend(model.bundle)
    backend.load(model.weights)
    logits = backend.answer(data.batch("train", np.arange(5))[0], "logits")
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    predictor = Predictor.of(write_inference(model.bundle, model.weights, {}))
    wanted = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(predictor.probabilities(images), wanted, rtol=1e-4, atol=1e-6)
    assert read_bundle(model.bundle.encoded()).std == tuple(STD)


def test_an_enrolment_carries_a_list_as_a_list_and_a_number_as_a_number():
    listed, plain = prepare(run(mean=MEAN, std=STD)), prepare(run(mean=0.5, std=2))
    again = codec.decode(codec.encode(listed, listed.spec), Enrolment, None)
    assert (again.mean, again.std) == (tuple(MEAN), tuple(STD))
    assert isinstance(plain.mean, float)
    assert isinstance(plain.std, float)
    body = msgspec.to_builtins(replace(plain, weights=None))
    assert (body["mean"], body["std"]) == (0.5, 2.0)
    assert codec.decode(codec.encode(plain, plain.spec), Enrolment, None).std == 2.0


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"mean": MEAN[:2]}, r"data.mean has 2 numbers; the model's input \(3, 32, 32\) has 3 channels"),
        ({"std": [*STD, 1.0]}, r"data.std has 4 numbers"),
    ],
)
def test_a_run_is_refused_where_channels_are_missing(data, line):
    with pytest.raises(SettingError, match=line):
        prepare(run(**data))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"std": [1.0, 0.0, 1.0]}, r"data.std\[1\]: expected `float` > 0"),
        ({"mean": []}, r"data.mean: expected `array` of length >= 1"),
        ({"mean": "grey"}, r"data.mean: expected `float \| array`, got `str`"),
    ],
)
def test_wrong_lists_are_named(data, line):
    with pytest.raises(SettingError, match=line):
        run(**data)


def test_a_strangers_enrolment_or_bundle_with_other_channels_is_refused():
    model = find_model(run())
    with pytest.raises(PacketCorrupt, match=r"data.mean has 2 numbers"):
        read_bundle(replace(model.bundle, mean=(0.1, 0.2)).encoded())
    hostile = replace(prepare(run()), std=(0.0, 1.0, 1.0))
    with pytest.raises(PacketError):
        codec.decode(codec.encode(hostile, hostile.spec), Enrolment, None)
