"""`python -m tests.zoo.step_memory onnx|torch BUNDLE`: print the memory of three training steps in MB."""

import sys
from pathlib import Path

import numpy as np

from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.model.backbone_file import read_backbone
from fleetune.protocols.randomness import Key

KEY = Key.of("zoo")
SAMPLES = 16


def random_batch(backend, index, step):
    """Return samples and labels at random, of the kind that a trainer takes."""
    rng, spec, task = KEY.child("batch", index, step).generator(), backend.spec, backend.task
    shape = (SAMPLES, *spec.input_shape)
    if backend.vocabulary is None:
        x = np.abs(rng.normal(size=shape)).astype(np.float32)  # columns may be categories
    else:
        x = rng.integers(backend.vocabulary, size=shape)
    if spec.reads.inputs:
        x = spec.reads.valid(x)
    target = task.target_shape(spec.num_classes, spec.input_shape)
    if target:
        return x, rng.normal(size=(SAMPLES, *target)).astype(np.float32)
    return x, rng.integers(spec.num_classes, size=SAMPLES)


def main(trainer, file):
    bundle = read_bundle(Path(file).read_bytes())
    weights = np.zeros(bundle.spec.size, np.float32) if bundle.weights is None else bundle.weights
    frozen = read_backbone(bundle.frozen, bundle.spec.backbone) if isinstance(bundle.frozen, bytes) else {}
    if trainer == "onnx":
        from fleetune.edge_agent.training.onnx_backend import OnnxBackend

        backend = OnnxBackend(bundle, frozen=frozen)
    else:
        import torch

        from fleetune.edge_agent.training.torch_backend import TorchBackend

        torch.set_num_threads(1)
        backend = TorchBackend.from_spec(bundle.spec, bundle.learns, frozen)
    backend.load(weights)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = _status("VmRSS")
    for step in range(3):
        backend.step(*random_batch(backend, 0, step), KEY)
    print((_status("VmHWM") - before) / 1e3)


def _status(label):
    """A figure of this process in kB."""
    line = next(one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith(label))
    return int(line.split()[1])


if __name__ == "__main__":
    main(*sys.argv[1:3])
