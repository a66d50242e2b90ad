"""Reads a workload for the scripts of this folder, without Fleetune."""

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
    """The files of a workload's folder.

    Attributes:
        workload: its settings, with devices, participants, rounds, epochs, batch_size, learning_rate.
        x, y: all samples.
        rows: training rows of each device, shape (devices, samples).
        test_rows: test rows of each device, which rivals do not use.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.workload = SimpleNamespace(**json.loads((self.folder / "workload.json").read_bytes()))
        with np.load(self.folder / "samples.npz") as arrays:
            self.x, self.y, self.rows = arrays["x"], arrays["y"], arrays["rows"]
            self.test_rows = arrays["test_rows"]

    def module(self) -> "torch.nn.Module":
        """The network, with its first weights."""
        import torch

        return torch.load(self.folder / "module.pt", weights_only=False)

    def samples(self, device: int) -> "tuple[torch.Tensor, torch.Tensor]":
        """Training samples of a device."""
        import torch

        rows = self.rows[device]
        return torch.from_numpy(self.x[rows]), torch.from_numpy(self.y[rows])


def given() -> tuple[Files, int]:
    """The workload and the number of processes, from the command line."""
    return Files(sys.argv[1]), int(sys.argv[2])


def device() -> str:
    """Name of the torch device."""
    return os.environ.get("BENCH_DEVICE", "cpu")


def round_over(number: int) -> None:
    """Print the line that marks the end of a round."""
    print(f"round {number}", flush=True)


def save(tensors: "dict[str, torch.Tensor]") -> None:
    """Save the final model."""
    np.savez("model.npz", **{name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()})


def train(
    module: "torch.nn.Module", x: "torch.Tensor", y: "torch.Tensor", workload: SimpleNamespace, seed: int
) -> None:
    """Local training in plain torch."""
    import torch

    optimiser = torch.optim.SGD(module.parameters(), lr=workload.learning_rate)
    loss_of, draw = torch.nn.CrossEntropyLoss(), torch.Generator().manual_seed(seed)
    module.train()
    x, y = x.to(device()), y.to(device())
    for _ in range(workload.epochs):
        for rows in torch.randperm(len(y), generator=draw).split(workload.batch_size):
            optimiser.zero_grad()
            loss_of(module(x[rows]), y[rows]).backward()
            optimiser.step()
