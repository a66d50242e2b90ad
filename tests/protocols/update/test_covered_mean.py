"""Sums of patches, chunk by chunk or by the compiled loop, are those of the plain formula, bit for bit."""

import sys

import numpy as np
import pytest

from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.update import compiled_sum
from fleetune.protocols.update import patch as patch_module
from fleetune.protocols.update.compiled_sum import CompiledSums
from fleetune.protocols.update.patch import CoveredMean, Patch
from fleetune.protocols.update.selection import Entries, Everything

SIZE = 1000
STATISTICS = 7
TENSORS = (
    TensorSpec("w", (SIZE,), "weight", "w", ((),)),
    TensorSpec("mean", (STATISTICS,), "stat", "n", ((),)),
)
SPEC = ModelSpec("flat", TENSORS, (), (1,), 2)


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
    calls = []
    for name in ("add_all", "add_selected"):
        loop = getattr(CompiledSums, name)
        monkeypatch.setattr(CompiledSums, name, counted(loop, name, calls))
    check_sums()
    assert calls == 4 * ["add_all"] + 19 * ["add_selected"]


def counted(loop, name, calls):
    def play(*given):
        calls.append(name)
        loop(*given)

    return play


@pytest.fixture
def never_compiled():
    compiled_sum._compiled.cache_clear()
    yield
    compiled_sum._compiled.cache_clear()


def test_with_a_small_model_or_without_numba_numpy_sums(monkeypatch, never_compiled):
    assert compiled_sum.compiled_sums(SIZE) is None
    monkeypatch.setattr(compiled_sum, "find_spec", lambda _: None)
    assert compiled_sum.compiled_sums(10**9) is None


def test_a_numba_that_does_not_go_with_numpy_is_said_and_numpy_sums(monkeypatch, caplog, never_compiled):
    monkeypatch.setattr(compiled_sum, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "numba", None)
    assert compiled_sum.compiled_sums(10**9) is None
    assert "Numba cannot be used, NumPy sums up updates: import of numba halted" in caplog.text


def check_sums():
    """Also while all patches hold everything, and once one does not."""
    draw = np.random.default_rng(0)
    mean, sums, weights = CoveredMean(SPEC), np.zeros(SPEC.size), np.zeros(SPEC.size)
    previous = draw.standard_normal(SPEC.size).astype(np.float32)
    whole = [(Everything(), weight) for weight in (2.0, 0.1, 0.3)]
    mixed = [(one, weight) for weight in (3.0, 0.1, 0.0, 7.0, 1e300) for one in selections(draw)]
    assert mean.over(previous).tobytes() == previous.tobytes()
    for selection, weight in whole + mixed:
        patch = Patch.of(draw.standard_normal(SPEC.size).astype(np.float32), selection, SPEC)
        patch.values[:1] = -0.0
        patch.values.setflags(write=False)  # as what came over the wire may be
        mean.add(patch, weight)
        mask = selection.mask(SPEC)
        sums[mask] += weight * patch.values.astype(np.float64)
        weights[mask] += weight
        assert mean.sums.tobytes() == sums.tobytes()
        covered, merged = weights > 0, previous.copy()
        merged[covered] = (sums[covered] / weights[covered]).astype(np.float32)
        assert mean.over(previous).tobytes() == merged.tobytes()
    assert mean.weights.tobytes() == weights.tobytes()


def test_where_all_send_everything_one_number_says_what_it_weighs():
    mean = CoveredMean(SPEC)
    for _ in range(3):
        mean.add(Patch.of(np.ones(SPEC.size, np.float32), Everything(), SPEC), 2.0)
    assert mean._apart is None
    assert mean.weights.tolist() == [6.0] * SIZE + [0.0] * STATISTICS
