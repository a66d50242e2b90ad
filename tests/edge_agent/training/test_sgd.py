"""The optimiser against its formula, to the last bit, and what it holds."""

import tracemalloc

import numpy as np
import pytest

from fleetune.edge_agent.training.sgd import BLOCK, FEW, Descent, optimiser_copies
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.skeletons.trainer import FitPlan, Pull

SIZE, STATISTICS = 2 * BLOCK + 1003, 40
SHARES = [None, 0.0, 0.001, FEW, 0.3, 0.9, 1.0]


def mask_of(share, draw):
    """Trainable entries by chance; none at all in the first block where few are."""
    if share is None:
        return None
    mask = np.append(draw.random(SIZE) < share, np.zeros(STATISTICS, np.bool_))
    mask[: BLOCK if share < FEW else 0] = False
    return mask


@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("share", SHARES)
def test_each_step_is_the_formula_to_the_last_bit(share, momentum, pulled):
    draw = Key.of("sgd", share or 0, momentum).generator()
    weights = draw.standard_normal(SIZE + STATISTICS).astype(np.float32)
    target, mask = draw.standard_normal(weights.size).astype(np.float32), mask_of(share, draw)
    plan = FitPlan(trainable=mask, pull=Pull(target, 0.1) if pulled else None)
    settings = TrainingSection(learning_rate=0.05, momentum=momentum, weight_decay=1e-3)
    found, gradient = weights.copy(), np.zeros_like(weights)
    descent = Descent(found, gradient, SIZE, settings, plan)
    wanted, velocity = weights.copy(), np.zeros(SIZE, np.float32)
    for _ in range(3):
        gradient[:] = g = draw.standard_normal(weights.size).astype(np.float32)
        descent.step()
        w, v = wanted[:SIZE], g[:SIZE]
        if pulled:
            v = v + (w - target[:SIZE]) * np.float32(2 * 0.1)
        v = v + w * np.float32(1e-3)
        velocity = velocity * np.float32(momentum) + v
        moved = w - velocity * np.float32(0.05)
        wanted[:SIZE] = moved if mask is None else np.where(mask[:SIZE], moved, w)
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("share", [0.01, 0.16, 0.5, 1.0])
def test_it_holds_no_more_than_it_says(share, momentum):
    size = 20 * BLOCK
    mask = Key.of("held").uniform(size) < share if share < 1 else np.ones(size, np.bool_)
    weights, gradient = np.ones(size, np.float32), np.ones(size, np.float32)
    settings = TrainingSection(momentum=momentum)
    tracemalloc.start()
    try:
        descent = Descent(weights, gradient, size, settings, FitPlan(trainable=mask))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert descent is not None
    told, scratch = optimiser_copies(share, momentum) * weights.nbytes, 4 * BLOCK
    assert 0.95 * told <= held <= 1.05 * told + scratch + 20_000
