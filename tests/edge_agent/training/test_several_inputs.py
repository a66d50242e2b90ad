"""A model with several inputs trains alike in both trainers, from the spec that devices receive."""

import msgspec
import numpy as np
import torch
from torch import nn

from fleetune.coordinator.export.make_bundle import make_run_model_bundle
from fleetune.edge_agent.training.device_data import DeviceData, check_fits
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.edge_agent.training.onnx_backend import OnnxBackend
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import ModelSection, TrainingSection

SECTION = ModelSection(
    f"{__name__}:net", inputs={"numbers": (5,), "ids": (4,), "mask": (4,)}, num_classes=3, output="scores"
)


class MaskedText(nn.Module):
    def __init__(self, shapes, classes):
        super().__init__()
        self.embed, self.drop = nn.Embedding(11, 6), nn.Dropout(0.3)
        self.out = nn.Linear(6 + shapes["numbers"][0], classes)

    def forward(self, batch):
        words = self.embed(batch["ids"]).masked_fill(~batch["mask"][..., None], 0).mean(1)
        return {"words": words, "scores": self.out(torch.cat([self.drop(words), batch["numbers"]], 1))}


def net(shapes, classes):
    return MaskedText(shapes, classes)


def test_both_trainers_end_alike():
    bundle = make_run_model_bundle(SECTION, Key(1))
    spec = msgspec.msgpack.decode(msgspec.msgpack.encode(bundle.spec), type=ModelSpec)
    assert [one.type for one in spec.reads.inputs] == ["int64", "bool", "float32"]
    draw = Key.of("samples").generator()
    x = spec.reads.valid(draw.standard_normal((30, 13)).astype(np.float32))
    data = check_fits(
        DeviceData(x, draw.integers(3, size=30), x[:0], np.zeros(0, int), x[:0], np.zeros(0, int)), spec
    )
    settings, weights = TrainingSection(epochs=2, batch_size=4, learning_rate=0.1), bundle.weights
    torch_end, onnx_end = (
        LocalTrainer(backend, data, settings).fit(weights, FitPlan(), Key.of("fit")).weights
        for backend in (TorchBackend.from_spec(spec), OnnxBackend(bundle))
    )
    assert np.linalg.norm(torch_end - weights) > 0.1
    np.testing.assert_allclose(onnx_end, torch_end, rtol=1e-5, atol=1e-6)
