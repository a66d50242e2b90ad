"""Workloads of the simulators, and the files that describe them to the scripts."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.sources import load
from fleetune.protocols.errors import DataError
from fleetune.protocols.files import write_atomically
from fleetune.protocols.randomness import Key

TEST_SAMPLES = 10  # number of test samples of each device; rivals do not use them
MOST_UNSEEN = 10_000  # samples for the final accuracy


@dataclass(frozen=True)
class Workload:
    """Federated averaging of one network.

    Attributes:
        name: name of the workload.
        model: name of a model that Fleetune builds.
        devices: number of devices.
        samples: training samples of each device.
        participants: devices in a round.
        rounds: rounds of a run.
        epochs, batch_size, learning_rate: local training by plain SGD.
        source: default source of its samples.
    """

    name: str
    model: str
    devices: int
    samples: int
    participants: int
    rounds: int = 10
    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 0.05
    source: str = "idx:fashion-mnist"


_CNN = "benchmarks.simulators.networks:cnn"
WORKLOADS = {
    one.name: one
    for one in (
        Workload("cnn", _CNN, devices=100, samples=120, participants=10, epochs=5),
        Workload("lenet5", "lenet5", devices=1000, samples=50, participants=100),
        Workload("mlp", "mlp", devices=1000, samples=50, participants=100),
        Workload(
            "har-cnn",
            "har-cnn",
            devices=80,
            samples=110,
            participants=10,
            epochs=5,
            source="har:UCI HAR Dataset",
        ),
    )
}


def lay_out(workload: Workload, source: str, folder: Path) -> None:
    """Write the files of a workload: workload.json, samples.npz, unseen.npz and module.pt.

    Args:
        workload: the workload.
        source: source of samples; "": the default.
        folder: where to write.

    Raises:
        DataError: the source is missing or has too few samples.
    """
    import torch

    from fleetune.protocols.model import architectures

    source = source or workload.source
    found = load(source, None)
    x, y = _as_given(found.x), found.y.astype(np.int64)
    assigned, unseen = _assigned(workload, len(y), source)
    torch.manual_seed(0)
    module = architectures.build(workload.model, x.shape[1:], int(y.max()) + 1)
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.arange(len(assigned)).reshape(workload.devices, -1)
    train_rows, test_rows = rows[:, : workload.samples], rows[:, workload.samples :]
    np.savez(folder / "samples.npz", x=x[assigned], y=y[assigned], rows=train_rows, test_rows=test_rows)
    np.savez(folder / "unseen.npz", x=x[unseen], y=y[unseen])
    torch.save(module, folder / "module.pt")
    write_atomically(folder / "workload.json", json.dumps(asdict(workload)).encode(), mode=None)


def _as_given(x: NDArray[np.generic]) -> NDArray[np.float32]:
    """Inputs as the scripts need them: images with one channel, scaled to 0 to 1; other samples unchanged."""
    scaled = x.astype(np.float32) / np.float32(255 if x.dtype == np.uint8 else 1)
    is_image = scaled.ndim == 3 and scaled.shape[1] == scaled.shape[2]
    return scaled[:, np.newaxis] if is_image else scaled


def _assigned(workload: Workload, num_samples: int, source: str) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows of the devices' samples, device by device, and rows that no device has."""
    needed = workload.devices * (workload.samples + TEST_SAMPLES)
    if num_samples <= needed:
        raise DataError(
            f"{source} has {num_samples} samples; {workload.name} takes more than {needed}, see --data"
        )
    order = Key.of("bench").permutation(num_samples)
    return order[:needed], order[needed : needed + MOST_UNSEEN]
