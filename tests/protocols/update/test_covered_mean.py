"""Sums of patches, chunk by chunk or by the compiled loop, are those of the plain formula, bit for bit."""

import sys

import numpy as np
import pytest

from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.update import compiled_sum
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
    check_sums()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_compiled_loop_sums_to_the_same_bits(threads, monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(compiled_sum, "WORTH_COMPILING", SIZE)
    monkeypatch.setattr(compiled_sum, "_OF_A_THREAD", SIZE // threads)
    monkeypatch.setattr(compiled_sum.os, "cpu_count", lambda: threads)
    monkeypatch.setattr(patch_module, "_CHUNK", None)  # else NumPy's loop was at work
    check_sums()


@pytest.fixture
def never_compiled():
    compiled_sum._compiled.cache_clear()
    yield
    compiled_sum._compiled.cache_clear()


def test_with_a_small_model_or_without_numba_numpy_sums(monkeypatch, never_compiled):
    assert compiled_sum.compiled_sum(SIZE) is None
    monkeypatch.setattr(compiled_sum, "find_spec", lambda _: None)
    assert compiled_sum.compiled_sum(10**9) is None


def test_a_numba_that_does_not_go_with_numpy_is_said_and_numpy_sums(monkeypatch, caplog, never_compiled):
    monkeypatch.setattr(compiled_sum, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compiled_sum.compiled_sum(10**9) is None
    assert "Numba cannot be used, NumPy sums up updates: import of numba halted" in caplog.text


def check_sums():
    draw = np.random.default_rng(0)
    mean, sums, weights = CoveredMean(SPEC), np.zeros(SIZE), np.zeros(SIZE)
    for weight in (3.0, 0.1, 0.0, 7.0, 1e300):
        for selection in selections(draw):
            patch = Patch.of(draw.standard_normal(SIZE).astype(np.float32), selection, SPEC)
            patch.values[:1] = -0.0
            patch.values.setflags(write=False)  # as what came over the wire may be
            mean.add(patch, weight)
            mask = selection.mask(SPEC)
            sums[mask] += weight * patch.values.astype(np.float64)
            weights[mask] += weight
    assert mean.sums.tobytes() == sums.tobytes()
    assert mean.weights.tobytes() == weights.tobytes()
