"""Time to add an update to a sum, against the time to read and write that memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.model.spec import ALWAYS_ACTIVE, ModelSpec, Span, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.combine import CoveredMean
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything

DENSITY = 0.3
TURNS = 7


@dataclass(frozen=True)
class Summed:
    """Time to add one update to the sum.

    Attributes:
        parameters: number of parameters of the model.
        density: share of the entries in the update.
        ms: minimum of several repetitions.
        floor_ms: minimum time of NumPy's addition of as many float64 values.
    """

    parameters: int
    density: float
    ms: float
    floor_ms: float


def summed(parameters: int, density: float) -> Summed:
    """Measure one addition on this machine."""
    spec = _spec(parameters)
    draws = Key.of("summing").generator()
    values = draws.standard_normal(parameters).astype(np.float32)
    selection = Everything() if density == 1 else Entries(draws.random(parameters) < density)
    patch, mean = Patch.of(values, selection, spec), CoveredMean(spec)
    sums, more = np.zeros(parameters), np.ones(parameters)
    took: dict[str, list[float]] = {"ours": [], "floor": []}
    for _ in range(TURNS):
        took["ours"].append(_seconds(lambda: mean.add(patch, 1.0)))
        took["floor"].append(_seconds(lambda: np.add(sums, more, out=sums)))
    return Summed(parameters, density, 1e3 * min(took["ours"]), 1e3 * min(took["floor"]))


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _spec(parameters: int) -> ModelSpec:
    """Spec of a model with one layer."""
    whole = (Span(ALWAYS_ACTIVE, 0, parameters),)
    tensor = TensorSpec("0.weight", (1, parameters), "weight", "0", ((), whole))
    return ModelSpec(name="summing", tensors=(tensor,), groups=(), input_shape=(parameters,), num_classes=1)
