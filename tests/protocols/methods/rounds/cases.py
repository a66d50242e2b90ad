"""Which rounds are played: the model, the devices, who takes part and whose updates arrive."""

from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

MODEL = [
    {"name": "a.weight", "shape": [3, 2], "kind": "weight", "layer": "a", "neurons": [0, None]},
    {"name": "a.bias", "shape": [3], "kind": "bias", "layer": "a", "neurons": [0]},
    {"name": "n.weight", "shape": [3], "kind": "norm", "layer": "n", "neurons": [0]},
    {"name": "b.weight", "shape": [2, 3], "kind": "weight", "layer": "b", "neurons": [1, 0]},
    {"name": "b.bias", "shape": [2], "kind": "bias", "layer": "b", "neurons": [1]},
    {"name": "c.weight", "shape": [3, 2], "kind": "weight", "layer": "c", "neurons": [None, 1]},
    {"name": "c.bias", "shape": [3], "kind": "bias", "layer": "c", "neurons": [None]},
    {"name": "n.running_mean", "shape": [3], "kind": "stat", "layer": "n", "neurons": [0]},
]
NUM_PARAMETERS = sum(int(np.prod(t["shape"])) for t in MODEL if t["kind"] != "stat")
SIZE = NUM_PARAMETERS + 3
TIED = ((2, 3), (12, 13), (15, 16), (22, 23))  # entries of a, b and c that are alike everywhere
ZERO = slice(26, 29)  # c.bias, where a case wants a tensor without any score


@dataclass(frozen=True)
class Case:
    """One run: devices as name -> (samples, ratio), rounds as "who takes part/whose updates arrive"."""

    name: str
    method: str
    settings: dict
    rounds: tuple[str, ...]
    note: str
    devices: dict = field(default_factory=lambda: dict.fromkeys("abcd", (10, 1.0)))
    joins: dict = field(default_factory=dict)
    seed: int = 1
    epochs: int = 2
    rate: float = 0.3
    spread: float = 1.0
    clusters: tuple[str, ...] = ()
    zero: bool = False

    def inputs(self):
        """What a reference is given, but for what is drawn."""
        rng = np.random.default_rng(self.seed)
        initial = self._vector(rng, 0.5)
        common = {members: self._vector(rng, 1.5) for members in self.clusters}
        devices = {}
        for number, (name, (samples, ratio)) in enumerate(self.devices.items(), start=1):
            own = self._vector(rng, self.spread)
            own += sum(vector for members, vector in common.items() if name in members)
            other = own + self._vector(rng, 0.4)
            if self.zero:
                own[ZERO] = other[ZERO] = 0
            devices[name] = {
                "samples": samples,
                "ratio": ratio,
                "classes": 1 + number % 3,
                "joins": self.joins.get(name, 1),
                "number": float(number),
                "train": np.round(own, 3),
                "validation": np.round(other, 3),
            }
        if self.zero:
            initial[ZERO] = 0
        return {
            "model": deepcopy(MODEL),
            "initial": np.round(initial, 3),
            "devices": devices,
            "training": {"epochs": self.epochs, "rate": self.rate},
            "settings": dict(self.settings),
            "rounds": [self._round(text) for text in self.rounds],
        }

    @staticmethod
    def _vector(rng, spread):
        vector = rng.uniform(-spread, spread, SIZE)
        for one, other in TIED:
            vector[other] = vector[one]
        return vector

    @staticmethod
    def _round(text):
        taking_part, _, arrived = text.partition("/")
        return {"participants": list(taking_part), "arrived": list(arrived or taking_part)}
