"""A workload as the scripts of this folder read it: numpy, torch where it is used, and no Fleetune."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


class Files:
    """What lies in a workload's folder.

    Attributes:
        asked: its settings: devices, participants, rounds, epochs, batch_size, learning_rate.
        x, y: all samples.
        rows: each device's for training, shape (devices, samples).
        test_rows: each device's for testing, which rivals leave alone.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.asked = SimpleNamespace(**json.loads((self.folder / "workload.json").read_bytes()))
        with np.load(self.folder / "samples.npz") as arrays:
            self.x, self.y, self.rows = arrays["x"], arrays["y"], arrays["rows"]
            self.test_rows = arrays["test_rows"]

    def module(self) -> "torch.nn.Module":
        """The network, with its first weights."""
        import torch

        return torch.load(self.folder / "module.pt", weights_only=False)

    def samples(self, device: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Of a device."""
        import torch

        rows = self.rows[device]
        return torch.from_numpy(self.x[rows]), torch.from_numpy(self.y[rows])


def given() -> tuple[Files, int]:
    """The workload of the command line, and how many processes are to play it."""
    return Files(sys.argv[1]), int(sys.argv[2])


def device() -> str:
    """What torch trains on."""
    return os.environ.get("BENCH_DEVICE", "cpu")


def round_over(number: int) -> None:
    """Say so."""
    print(f"round {number}", flush=True)


def save(tensors: "dict[str, torch.Tensor]") -> None:
    """The model at the end."""
    np.savez("model.npz", **{name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()})


def train(
    module: "torch.nn.Module", x: "torch.Tensor", y: "torch.Tensor", asked: SimpleNamespace, seed: int
) -> None:
    """Local training as one writes it in plain torch."""
    import torch

    optimiser = torch.optim.SGD(module.parameters(), lr=asked.learning_rate)
    loss_of, draw = torch.nn.CrossEntropyLoss(), torch.Generator().manual_seed(seed)
    module.train()
    x, y = x.to(device()), y.to(device())
    for _ in range(asked.epochs):
        for rows in torch.randperm(len(y), generator=draw).split(asked.batch_size):
            optimiser.zero_grad()
            loss_of(module(x[rows]), y[rows]).backward()
            optimiser.step()
