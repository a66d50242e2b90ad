"""One run of federated averaging in memory, with the bytes up and the accuracy of each round."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.wire.fedpm import FedPm
from benchmarks.wire.fleet import Fleet
from benchmarks.wire.sender import Sender
from benchmarks.wire.senders import SENDERS
from fleetune.protocols.errors import TrainingDiverged
from fleetune.protocols.files import write_atomically
from fleetune.protocols.method.averaging import SharedModel, Update
from fleetune.protocols.methods.fedavg import FedAvg
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything
from fleetune.protocols.wire.payloads import run_key

_LAST = 5  # rounds whose mean is the final accuracy


@dataclass(frozen=True)
class Configuration:
    """One row of the table.

    Attributes:
        sender: name in `SENDERS` or `OWN_TRAINING`.
        rate, momentum: server learning rate and momentum, see `protocols.methods.fedavg`.
    """

    sender: str
    rate: float = 1.0
    momentum: float = 0.0

    @property
    def label(self) -> str:
        rate = "" if self.rate == 1 else f" rate {self.rate:g}"
        return self.sender + rate + (f" momentum {self.momentum:g}" if self.momentum else "")


@dataclass(frozen=True)
class Run:
    """Result of a configuration with one seed.

    Attributes:
        setting, configuration, seed: what ran.
        bytes_up: cumulative bytes after each round.
        accuracy: accuracy of the shared model on all test samples after each round, 0 to 1.
        bytes_down: bytes of a round that sends float32 to every participant.
        seconds: processor time.
    """

    setting: str
    configuration: str
    seed: int
    bytes_up: list[float]
    accuracy: list[float]
    bytes_down: int
    seconds: float

    @property
    def final(self) -> float:
        """Mean accuracy of the last rounds."""
        return float(np.mean(self.accuracy[-_LAST:]))

    def bytes_to(self, accuracy: float) -> float | None:
        """Bytes up until this accuracy is reached; None if it never is."""
        rounds = zip(self.bytes_up, self.accuracy, strict=True)
        return next((bytes_up for bytes_up, reached in rounds if reached >= accuracy), None)


class Training(Protocol):
    """A configuration's state during a run."""

    def run_round(self, number: int) -> tuple[FlatArray, float]:
        """Run a round, from 1; return the shared model and the bytes that devices sent."""
        ...


@dataclass
class Averaging:
    """Devices train the shared model and send steps; the coordinator averages and applies them.

    Attributes:
        fleet: the devices.
        sender: the devices' side.
        method: the coordinator's side.
    """

    fleet: Fleet
    sender: Sender
    method: FedAvg

    def __post_init__(self) -> None:
        self._state = SharedModel(self.fleet.first_weights.copy())

    def run_round(self, number: int) -> tuple[FlatArray, float]:
        fleet, weights = self.fleet, self._state.weights
        drawn = fleet.participants(number)
        samples = sum(map(fleet.num_samples, drawn))
        shares = {device: fleet.num_samples(device) / samples for device in drawn}
        trained = {device: fleet.trained(weights, device, number) for device in drawn}
        arrived = self.sender.send(weights, trained, shares, run_key(fleet.seed).child("wire", number))
        mean = Patch.of(weights + arrived.step, Everything(), self.method.spec)
        self._state = self.method.aggregate(self._state, [("all", Update(mean, 1))])
        return self._state.weights, arrived.num_bytes


OWN_TRAINING: dict[str, Callable[[Fleet], Training]] = {"fedpm": FedPm}
"""Configurations with their own training and aggregation instead of FedAvg's."""


def run_to_end(fleet: Fleet, setting: str, configuration: Configuration) -> Run:
    """Run a configuration for the setting's rounds.

    After a divergence it sends nothing, and its accuracy is 0.
    """
    began, training = time.process_time(), _training(fleet, configuration)
    total, bytes_up, accuracy = 0.0, list[float](), list[float]()
    for number in range(1, fleet.setting.rounds + 1):
        try:
            weights, num_bytes = training.run_round(number)
        except TrainingDiverged:
            left = fleet.setting.rounds - len(accuracy)
            bytes_up += [total] * left
            accuracy += [0.0] * left
            break
        total += num_bytes
        bytes_up.append(total)
        accuracy.append(fleet.accuracy(weights))
    down = 4 * fleet.spec.size * fleet.setting.participants
    seconds = time.process_time() - began
    return Run(setting, configuration.label, fleet.seed, bytes_up, accuracy, down, seconds)


def _training(fleet: Fleet, configuration: Configuration) -> Training:
    if configuration.sender in OWN_TRAINING:
        return OWN_TRAINING[configuration.sender](fleet)
    method = FedAvg(fleet.spec, server_rate=configuration.rate, server_momentum=configuration.momentum)
    return Averaging(fleet, SENDERS[configuration.sender](fleet.spec), method)


def save(run: Run, path: Path) -> None:
    """Write a finished run to a file."""
    write_atomically(path, json.dumps(asdict(run)).encode(), mode=None)


def saved(path: Path) -> Run | None:
    """Read an earlier run, or None."""
    return Run(**json.loads(path.read_bytes())) if path.exists() else None
