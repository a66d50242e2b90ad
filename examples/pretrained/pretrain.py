"""Pretrain ResNet-8 on a part of Fashion-MNIST, and assign the rest to the fleet.

    cd examples/pretrained
    FLEETUNE_DATA=FOLDER python pretrain.py     # FOLDER has fashion-mnist/train-images-idx3-ubyte.gz, ...

writes pretrained.safetensors, from which personal.toml starts.
"""

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

PRETRAINED = 20_000  # number of images for pretraining: the first ones
DEALT = 4_000  # number of images for the fleet: those after them
EPOCHS, BATCH, RATE = 2, 64, 0.05


def _idx(name: str) -> Array:
    folder = Path(os.environ.get("FLEETUNE_DATA", ".")) / "fashion-mnist"
    content = gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes())
    shape = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def data() -> dict[str, Array]:
    """Samples for the fleet's devices: images that the backbone was not trained on."""
    images, labels = _idx("train-images-idx3"), _idx("train-labels-idx1")
    rows = slice(PRETRAINED, PRETRAINED + DEALT)
    return {"x": images[rows, None], "y": labels[rows].astype(np.int64)}


def pretrain(path: str) -> None:
    """Train the whole network and write it as safetensors."""
    import torch
    from safetensors.torch import save_file

    from fleetune.protocols.model.architectures import build

    torch.manual_seed(0)
    torch.set_num_threads(1)
    images = torch.from_numpy(_idx("train-images-idx3")[:PRETRAINED, None] / np.float32(255))
    labels = torch.from_numpy(_idx("train-labels-idx1")[:PRETRAINED].astype(np.int64))
    model = build("resnet8", (1, 28, 28), 10).to(memory_format=torch.channels_last)
    steps = EPOCHS * (PRETRAINED // BATCH)
    optimiser = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for epoch in range(EPOCHS):
        for rows in torch.randperm(PRETRAINED)[: steps // EPOCHS * BATCH].reshape(-1, BATCH):
            loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
        print(f"epoch {epoch + 1} of {EPOCHS}: loss {loss.item():.3f}")
    tensors = {name: one.contiguous() for name, one in model.state_dict().items() if "batches" not in name}
    save_file(tensors, path)


if __name__ == "__main__":
    pretrain("pretrained.safetensors")
