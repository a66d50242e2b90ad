"""Sums of patches, chunk by chunk, are those of the plain formula, bit for bit."""

import tracemalloc
from copy import deepcopy

import numpy as np
import pytest

from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.update import combine
from fleetune.protocols.update.combine import CoveredMean
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything

SIZE = 1000
STATISTICS = 7
TENSORS = (
    TensorSpec("w", (SIZE,), "weight", "w", ((),)),
    TensorSpec("mean", (STATISTICS,), "stat", "n", ((),)),
)
SPEC = ModelSpec("flat", TENSORS, (), (1,), 2)

WEIGHTS = {  # of patches that are all `Everything`, of those that follow, and how they are kept in the end
    "samples": ((2.0, 70.0, 1.0), (3.0, 0.0, 7.0, 5_000.0), np.uint32),
    "more samples than are counted": ((2.0,), (3.0, 2.0**31, 7.0, 2.0**31), np.float64),
    "shares": ((2.0, 0.1, 0.3), (3.0, 0.1, 0.0, 7.0, 1e300), np.float64),
    "shares after samples": ((2.0, 7.0), (3.0, 0.1, 4.0), np.float64),
}
every_weight = pytest.mark.parametrize("case", WEIGHTS)


def selections(draw):
    scattered = draw.random(SIZE) < 0.3
    neighbours = np.zeros(SIZE, np.bool_)
    neighbours[130:520] = True
    return [Everything(), Entries(scattered), Entries(neighbours), Entries(np.zeros(SIZE, np.bool_))]


@every_weight
@pytest.mark.parametrize("chunk", [64, 333, 4096])
def test_the_sums_are_those_of_the_plain_formula(chunk, case, monkeypatch):
    monkeypatch.setattr(combine, "_CHUNK", chunk)
    check_sums(*WEIGHTS[case])


def check_sums(whole_weights, weights_in_turn, kind):
    """Also while all patches hold everything, and once one does not."""
    draw = np.random.default_rng(0)
    mean, sums, weights = CoveredMean(SPEC), np.zeros(SPEC.size), np.zeros(SPEC.size)
    previous = draw.standard_normal(SPEC.size).astype(np.float32)
    whole = [(Everything(), weight) for weight in whole_weights]
    mixed = [(one, weight) for weight in weights_in_turn for one in selections(draw)]
    assert deepcopy(mean).over(previous).tobytes() == previous.tobytes()
    for selection, weight in whole + mixed:
        drawn = draw.standard_normal(SPEC.size).astype(np.float32)
        drawn[:1] = -0.0
        patch = Patch.of(drawn, selection, SPEC)
        patch.values.setflags(write=False)  # as what came over the wire may be
        mean.add(patch, weight)
        mask = selection.mask(SPEC)
        sums[mask] += weight * patch.values.astype(np.float64)
        weights[mask] += weight
        assert mean.sums.tobytes() == sums.tobytes()
        covered, merged = weights > 0, previous.copy()
        merged[covered] = (sums[covered] / weights[covered]).astype(np.float32)
        assert deepcopy(mean).over(previous).tobytes() == merged.tobytes()
        assert mean.weights.astype(np.float64).tobytes() == weights.tobytes()
    assert mean._apart.dtype == kind


@pytest.mark.parametrize(("density", "most_models"), [(1.0, 2.0), (0.3, 3.0)])
def test_it_takes_two_models_of_memory_and_three_where_devices_send_parts(density, most_models):
    size = 900_000
    spec = ModelSpec("flat", (TensorSpec("w", (size,), "weight", "w", ((),)),), (), (1,), 2)
    values = np.ones(size, np.float32)
    selection = Everything() if density == 1 else Entries(np.random.default_rng(0).random(size) < density)
    patch = Patch.of(values, selection, spec)
    tracemalloc.start()
    try:
        mean = CoveredMean(spec)
        for weight in (70.0, 30.0):
            mean.add(patch, weight)
        begun = mean.over(values)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert begun.tobytes() == values.tobytes()
    assert peak < (most_models + 0.5) * values.nbytes  # besides: chunks, and a mask of a byte an entry
    assert held < (most_models - 0.5) * values.nbytes


def test_where_all_send_everything_one_number_says_what_it_weighs():
    mean = CoveredMean(SPEC)
    for _ in range(3):
        mean.add(Patch.of(np.ones(SPEC.size, np.float32), Everything(), SPEC), 2.0)
    assert mean._apart is None
    assert mean.weights.tolist() == [6.0] * SIZE + [0.0] * STATISTICS
