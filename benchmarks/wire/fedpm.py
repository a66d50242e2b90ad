"""FedPM (Isik, Pase, Gunduz, Weissman, Zorzi 2023, arXiv:2209.15328), for comparison only.

Weights keep their random initial values. FedPM learns for each weight the probability that it is present.
Devices train scores and send one sample of the mask.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.wire.fleet import Fleet
from fleetune.edge_agent.training.local_training import batch_slices
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.wire.payloads import run_key, work_key

Vector = NDArray[np.float64]

_LEAST = 0.01  # probability; so entries on which all masks agree can still change (authors' code)
_FIRST, _SECOND, _TINY = 0.9, 0.999, 1e-8  # parameters of Adam, as published


@dataclass
class _Adam:
    """Adam of one device, kept from round to round as in the authors' code."""

    rate: float
    mean: Vector
    square: Vector
    steps: int = 0

    def step(self, gradient: Vector) -> Vector:
        """Return the value to subtract."""
        self.steps += 1
        self.mean += (1 - _FIRST) * (gradient - self.mean)
        self.square += (1 - _SECOND) * (gradient**2 - self.square)
        mean = self.mean / (1 - _FIRST**self.steps)
        return self.rate * mean / (np.sqrt(self.square / (1 - _SECOND**self.steps)) + _TINY)


@dataclass
class FedPm:
    """FedPM with its own training, sending and aggregation, after the authors' code.

    As in that code (github.com/BerivanIsik/sparse-random-networks): Weights and biases are plus or minus e /
    sqrt(fan-in). Scores start as N(0, 1) and are trained by Adam. Masks count as 0.01 and 0.99. The bytes of
    a mask are the entropy of its share of ones plus log2 of its size.

    Differs from the authors' code:
    - Priors (lambda_0 = 1) are reset once every device could have taken part; their code resets them every
      round.
    - The gradient passes a sample of the mask unchanged; their code multiplies it by the probability.
    - The evaluated network is the mean over masks; their code uses one sample, which is much worse on small
      networks.

    It needs models without running statistics.

    Attributes:
        fleet: data, batches, epochs and participants, the same for all configurations.
        rate: learning rate of Adam on the scores. Theirs is 0.1; of 0.01, 0.1 and 0.3 the last is best on
            fashion-0.5.
    """

    fleet: Fleet
    rate: float = 0.3
    _optimisers: dict[int, _Adam] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        setting, size = self.fleet.setting, self.fleet.spec.size
        draws = run_key(self.fleet.seed).child("fedpm").generator()
        self._frozen = frozen_weights(self.fleet.spec, draws)
        self._chances = _sigmoid(draws.standard_normal(size))
        self._hits, self._masks = np.zeros(size), 0
        self._reset_every = math.ceil(setting.devices / setting.participants)

    def run_round(self, number: int) -> tuple[FlatArray, float]:
        """Run a round; return the mean network and the bytes that devices sent."""
        if (number - 1) % self._reset_every == 0:
            self._hits, self._masks = np.zeros(self._frozen.size), 0
        num_bytes = 0.0
        for device in self.fleet.participants(number):
            mask = self._mask(device, number)
            self._hits += np.where(mask, 1 - _LEAST, _LEAST)
            self._masks += 1
            num_bytes += mask_bytes(mask)
        self._chances = self._hits / self._masks  # the mode of Beta(1 + hits, 1 + masks - hits)
        return (self._chances * self._frozen).astype(np.float32), num_bytes

    def _mask(self, device: int, number: int) -> NDArray[np.bool_]:
        """Train a device's scores straight through samples of the mask; return its mask."""
        trainer = self.fleet.trainers[device]
        key = work_key(self.fleet.seed, number, 1, f"device-{device}")
        draws, scores = key.child("fedpm").generator(), np.log(self._chances / (1 - self._chances))
        zeros = np.zeros(scores.size)
        adam = self._optimisers.setdefault(device, _Adam(self.rate, zeros, zeros.copy()))
        for epoch in range(trainer.settings.epochs):
            order = key.child("epoch", epoch).permutation(trainer.num_samples)
            for batch in batch_slices(trainer.num_samples, trainer.settings.batch_size):
                chances = _sigmoid(scores)
                trainer.backend.load(self._drawn(chances, draws))
                x, y = trainer.data.batch("train", order[batch])
                trainer.backend.step(x, trainer.task.targets(x, y), key)
                scores -= adam.step(trainer.backend.gradient * self._frozen * chances * (1 - chances))
        return draws.random(scores.size) < _sigmoid(scores)

    def _drawn(self, chances: Vector, draws: np.random.Generator) -> FlatArray:
        network: FlatArray = np.where(draws.random(chances.size) < chances, self._frozen, 0)
        return network.astype(np.float32)


def frozen_weights(spec: ModelSpec, draws: np.random.Generator) -> Vector:
    """Random weights of plus or minus e / sqrt(fan-in); a bias like its layer's weights."""
    scales, fan_in = np.empty(spec.size), 1
    start = 0
    for tensor in spec.tensors:
        if len(tensor.shape) > 1:
            fan_in = math.prod(tensor.shape[1:])
        scales[start : start + tensor.size] = math.e / math.sqrt(fan_in)
        start += tensor.size
    return np.where(draws.random(spec.size) < 0.5, -scales, scales)


def mask_bytes(mask: NDArray[np.bool_]) -> float:
    """Bytes of an ideal arithmetic code of a mask by its share of ones, and of that share."""
    share, size = float(mask.mean()), mask.size
    entropy = -sum(part * math.log2(part) for part in (share, 1 - share) if part)
    return (size * entropy + math.log2(size)) / 8


def _sigmoid(scores: Vector) -> Vector:
    chances: Vector = 1 / (1 + np.exp(-scores))
    return chances
