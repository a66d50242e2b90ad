"""The optimiser at work on a card comes to what it comes to on the processor."""

import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.edge_agent.training.test_descent import ALL
from tests.helpers import card
from tests.helpers.nightly import sooner

from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.edge_agent.training.descent import Descent
from fleetune.edge_agent.training.gpu.flat_vectors import FlatVectors
from fleetune.edge_agent.training.gpu.gpu_descent import GpuDescent
from fleetune.edge_agent.training.gpu.torch_device import torch_device
from fleetune.edge_agent.training.optimisers import optimiser_of
from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState
from fleetune.protocols.method.trainer import FitPlan, LowerLayers, Pull
from fleetune.protocols.randomness import Key

SPEC, START = draw("resnet8", (3, 16, 16), 7, Key(3))
SIZE = SPEC.num_parameters
STEPS = 5


def some(share, seed=1):
    mask = np.random.default_rng(seed).random(SPEC.size) < share
    mask[SIZE:] = False
    return mask


def pull(mask=None):
    return Pull(START * np.float32(0.5), 0.3, mask)


PLANS = {
    "all": FitPlan(),
    "half": FitPlan(trainable=some(0.5)),
    "none": FitPlan(trainable=some(0.0)),
    "pulled": FitPlan(pull=pull()),
    "some pulled, some trainable": FitPlan(trainable=some(0.3), pull=pull(some(0.6, 2))),
    "lower layers seldom": FitPlan(lower=LowerLayers(SPEC.slices[SPEC.tensors[9].name].start, 0.5)),
    "all layers seldom": FitPlan(lower=LowerLayers(SIZE, 0.5)),
    "lower layers seldom, half": FitPlan(
        trainable=some(0.5), lower=LowerLayers(SPEC.slices[SPEC.tensors[9].name].start, 0.5), pull=pull()
    ),
}


def before_of(settings, what):
    if what == "forgets":
        return None
    optimiser, draws = optimiser_of(settings), np.random.default_rng(4)
    number = optimiser.num_vectors + optimiser.counts_steps
    if what == "begins":
        return OptimiserState(tuple(np.zeros(SIZE, np.float32) for _ in range(number)))
    vectors = [draws.random(SIZE).astype(np.float32) for _ in range(optimiser.num_vectors)]
    if optimiser.counts_steps:
        vectors.append(draws.integers(0, 4, SIZE).astype(np.float32))
    return OptimiserState(tuple(vectors))


def gradients():
    draws = np.random.default_rng(0)
    found = draws.standard_normal((STEPS, SPEC.size)).astype(np.float32)
    found[:, SIZE:] = 0
    return found


def here(settings, plan, before):
    """Weights, norms and state on the processor."""
    weights, gradient = START.copy(), np.zeros_like(START)
    descent, norms = Descent(weights, gradient, SIZE, settings, plan, before), []
    for number, one in enumerate(gradients()):
        gradient[:] = one
        norms.append(descent.step(move_lower=move_lower(plan, number)))
    return weights, norms, None if before is None else descent.state()


def move_lower(plan, number):
    return plan.lower is None or number % 2 == 1


def there(settings, plan, before):
    """Likewise on a card."""
    vectors = FlatVectors(SPEC, torch_device(card.NAME))
    vectors.load(START)
    descent, norms = GpuDescent(vectors, SIZE, settings, plan, before), []
    for number, one in enumerate(gradients()):
        put_gradient(vectors, one)
        norms.append(descent.step(move_lower=move_lower(plan, number)))
    return vectors.current_weights().copy(), norms, None if before is None else descent.state()


def put_gradient(vectors, gradient):
    vectors.torch_gradient.copy_(vectors.to_torch(torch.from_numpy(gradient).to(card.NAME)))


assert_same = np.testing.assert_array_equal


def assert_close(ours, theirs):
    """Torch's square roots are not all numpy's: they may be the next number."""
    np.testing.assert_allclose(ours, theirs, rtol=2e-6, atol=4e-7 * np.abs(theirs).max())


CASES = list(itertools.product(ALL, PLANS, ("forgets", "begins", "goes on")))
SOONER = {case for case in CASES if case[::2] == ("adamw", "goes on") or case[1:] == ("half", "begins")}


@pytest.mark.parametrize(("name", "plan", "before"), sooner(CASES, kept=SOONER))
def test_it_comes_to_the_same(name, plan, before):
    settings, plan = ALL[name], PLANS[plan]
    started = before_of(settings, before)
    weights, norms, state = here(settings, plan, started)
    found, found_norms, found_state = there(settings, plan, started)
    assert norms == found_norms == [None] * STEPS
    same = assert_same if name.startswith("sgd") else assert_close
    same(found, weights)
    if state is not None:
        for ours, theirs in zip(found_state.vectors, state.vectors, strict=True):
            same(ours, theirs)


@pytest.mark.parametrize("plan", sooner(PLANS, kept=3))
@pytest.mark.parametrize("name", ["sgd, momentum", "adamw"])
def test_clipped_it_does_but_for_the_rounding_of_norms(name, plan):
    settings = replace(ALL[name], clip_norm=0.7)
    weights, norms, _ = here(settings, PLANS[plan], None)
    found, found_norms, _ = there(settings, PLANS[plan], None)
    assert found_norms == pytest.approx(norms, rel=1e-4)
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-6)


def test_one_that_diverges_reports_its_norm():
    settings = replace(ALL["sgd"], clip_norm=1.0)
    vectors = FlatVectors(SPEC, torch_device(card.NAME))
    descent = GpuDescent(vectors, SIZE, settings, FitPlan(), None)
    put_gradient(vectors, np.full_like(START, np.inf))
    assert not np.isfinite(descent.step())
