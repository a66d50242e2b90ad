"""Sums of patches, chunk by chunk, are those of the plain formula, bit for bit."""

import numpy as np
import pytest

from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.update import patch as patch_module
from fleetune.protocols.update.patch import CoveredMean, Patch
from fleetune.protocols.update.selection import Entries, Everything

SIZE = 1000
SPEC = ModelSpec("flat", (TensorSpec("w", (SIZE,), "weight", "w", ((),)),), (), (1,), 2)


def selections(draw):
    scattered = draw.random(SIZE) < 0.3
    neighbours = np.zeros(SIZE, np.bool_)
    neighbours[130:520] = True
    return [Everything(), Entries(scattered), Entries(neighbours), Entries(np.zeros(SIZE, np.bool_))]


@pytest.mark.parametrize("chunk", [64, 333, 4096])
def test_the_sums_are_those_of_the_plain_formula(chunk, monkeypatch):
    monkeypatch.setattr(patch_module, "_CHUNK", chunk)
    draw = np.random.default_rng(0)
    mean, sums, weights = CoveredMean(SPEC), np.zeros(SIZE), np.zeros(SIZE)
    for weight in (3.0, 0.1, 0.0, 7.0):
        for selection in selections(draw):
            patch = Patch.of(draw.standard_normal(SIZE).astype(np.float32), selection, SPEC)
            patch.values[:1] = -0.0
            mean.add(patch, weight)
            mask = selection.mask(SPEC)
            sums[mask] += weight * patch.values.astype(np.float64)
            weights[mask] += weight
    assert mean.sums.tobytes() == sums.tobytes()
    assert mean.weights.tobytes() == weights.tobytes()
