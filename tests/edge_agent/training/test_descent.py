"""Every optimiser against torch's; what holds for all: frozen entries, pull, clipping, memory, kept state."""

import tracemalloc
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from fleetune.edge_agent.training.descent import BLOCK, FEW, Descent, optimiser_footprint
from fleetune.edge_agent.training.optimisers import REGISTRY
from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState
from fleetune.protocols.method.trainer import FitPlan, LowerLayers, Pull
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection

SIZE, STATISTICS = 2 * BLOCK + 1003, 40
SHARES = [None, 0.0, 0.001, FEW, 0.3, 0.9, 1.0]
ALL = {
    "sgd": TrainingSection(weight_decay=1e-3),
    "sgd, momentum": TrainingSection(momentum=0.9, weight_decay=1e-3),
    "adamw": TrainingSection(optimiser="adamw", learning_rate=0.01, weight_decay=0.1),
    "adamw, betas": TrainingSection(optimiser="adamw", learning_rate=0.01, betas=(0.5, 0.9), eps=1e-3),
    "rmsprop": TrainingSection(optimiser="rmsprop", learning_rate=0.003, weight_decay=1e-3),
    "rmsprop, momentum": TrainingSection(
        optimiser="rmsprop", learning_rate=0.003, alpha=0.9, eps=1e-4, momentum=0.9
    ),
}


def torch_optimiser(settings, weights):
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimiser == "sgd":
        return torch.optim.SGD([weights], lr=rate, momentum=settings.momentum, weight_decay=decay)
    if settings.optimiser == "adamw":
        return torch.optim.AdamW(
            [weights], lr=rate, betas=settings.betas, eps=settings.eps, weight_decay=decay
        )
    return torch.optim.RMSprop(
        [weights],
        lr=rate,
        alpha=settings.alpha,
        eps=settings.eps,
        momentum=settings.momentum,
        weight_decay=decay,
    )


def mask_of(share, draw):
    """Trainable entries by chance; none at all in the first block where few are."""
    if share is None:
        return None
    mask = np.append(draw.random(SIZE) < share, np.zeros(STATISTICS, np.bool_))
    mask[: BLOCK if share < FEW else 0] = False
    return mask


def gradients(draw, number):
    return [draw.standard_normal(SIZE + STATISTICS).astype(np.float32) for _ in range(number)]


def descended(settings, start, given, plan, before=None):
    """The weights after a step with each gradient given, and what is remembered."""
    weights, gradient = start.copy(), np.empty_like(start)
    descent = Descent(weights, gradient, SIZE, settings, plan, before)
    for one in given:
        gradient[:] = one
        descent.step()
    return weights, None if before is None else descent.state()


def test_every_optimiser_that_run_toml_names_is_here():
    assert set(REGISTRY) == set(get_args(get_type_hints(TrainingSection)["optimiser"]))
    assert set(REGISTRY) == {settings.optimiser for settings in ALL.values()}


@pytest.mark.parametrize("clip_norm", [None, 100.0])
@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ALL)
def test_steps_are_torch_s_and_frozen_entries_stay(name, share, pulled, clip_norm):
    """Torch gets the trainable entries alone, as a tensor of their own."""
    draw = Key.of("descent", name, share or 0).generator()
    start, target = gradients(draw, 2)
    mask, given = mask_of(share, draw), gradients(draw, 5)
    pull = Pull(target, 0.1, draw.random(start.size) < 0.5) if pulled else None
    settings = replace(ALL[name], clip_norm=clip_norm)
    if mask is not None:
        for one in given:
            one[~mask] = np.nan  # a frozen entry's gradient may be anything
    found, _ = descended(settings, start, given, FitPlan(trainable=mask, pull=pull))

    trained = slice(0, SIZE) if mask is None else mask
    weights = torch.tensor(start[trained], requires_grad=True)
    optimiser = torch_optimiser(settings, weights)
    for one in given:
        weights.grad = torch.tensor(one[trained])
        if pulled:
            wanted = torch.tensor(pull.mask[trained] * np.float32(2 * pull.strength))
            weights.grad += wanted * (weights.detach() - torch.tensor(target[trained]))
        if clip_norm is not None and weights.numel():
            torch.nn.utils.clip_grad_norm_([weights], clip_norm)
        optimiser.step()
    np.testing.assert_allclose(found[trained], weights.detach().numpy(), rtol=1e-6, atol=1e-6)
    if mask is not None:
        assert found[~mask].tobytes() == start[~mask].tobytes()
    assert found[SIZE:].tobytes() == start[SIZE:].tobytes()


@pytest.mark.parametrize("pulled", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("share", SHARES)
def test_sgd_is_its_formula_to_the_last_bit(share, momentum, pulled):
    draw = Key.of("sgd", share or 0, momentum).generator()
    weights, target = gradients(draw, 2)
    mask, given = mask_of(share, draw), gradients(draw, 3)
    plan = FitPlan(trainable=mask, pull=Pull(target, 0.1) if pulled else None)
    settings = TrainingSection(learning_rate=0.05, momentum=momentum, weight_decay=1e-3)
    found, _ = descended(settings, weights, given, plan)
    wanted, velocity = weights.copy(), np.zeros(SIZE, np.float32)
    for one in given:
        w, v = wanted[:SIZE], one[:SIZE]
        if pulled:
            v = v + (w - target[:SIZE]) * np.float32(2 * 0.1)
        v = v + w * np.float32(1e-3)
        velocity = velocity * np.float32(momentum) + v
        moved = w - velocity * np.float32(0.05)
        wanted[:SIZE] = moved if mask is None else np.where(mask[:SIZE], moved, w)
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("share", [None, 0.1, 0.5])
@pytest.mark.parametrize("name", ALL)
def test_what_is_kept_goes_on_as_if_it_had_never_stopped(name, share):
    draw = Key.of("kept", name).generator()
    (start,), given, settings = gradients(draw, 1), gradients(draw, 5), ALL[name]
    plan = FitPlan(trainable=mask_of(share, draw))
    whole, at_the_end = descended(settings, start, given, plan, OptimiserState(()))
    half, kept = descended(settings, start, given[:2], plan, OptimiserState(()))
    before = [vector.tobytes() for vector in kept.vectors]
    found, after = descended(settings, half, given[2:], plan, kept)
    assert found.tobytes() == whole.tobytes()
    assert [one.tobytes() for one in after.vectors] == [one.tobytes() for one in at_the_end.vectors]
    assert [vector.tobytes() for vector in kept.vectors] == before
    alone, _ = descended(settings, start, given, plan)
    assert alone.tobytes() == whole.tobytes()


@pytest.mark.parametrize("shares", [(0.1, 0.2), (0.6, 0.1), (0.2, 0.7), (0.5, None)])
@pytest.mark.parametrize("name", ALL)
def test_entries_that_train_in_other_rounds_have_a_memory_each(name, shares):
    """Torch has one optimiser for each entry that trains in both descents, in the first, in the second."""
    draw = Key.of("rounds", name).generator()
    (start,), settings = gradients(draw, 1), ALL[name]
    masks, given = [mask_of(share, draw) for share in shares], [gradients(draw, 2), gradients(draw, 3)]
    found, state = start, OptimiserState(())
    for mask, those in zip(masks, given, strict=True):
        found, state = descended(settings, found, those, FitPlan(trainable=mask), state)
    first, second = (np.ones(SIZE, np.bool_) if mask is None else mask[:SIZE] for mask in masks)
    for group, mine in ((first & second, [0, 1]), (first & ~second, [0]), (~first & second, [1])):
        weights = torch.tensor(start[:SIZE][group], requires_grad=True)
        optimiser = torch_optimiser(settings, weights)
        for index in mine:
            for one in given[index]:
                weights.grad = torch.tensor(one[:SIZE][group])
                optimiser.step()
        np.testing.assert_allclose(found[:SIZE][group], weights.detach().numpy(), rtol=1e-6, atol=1e-6)
    untouched = ~(first | second)
    assert found[:SIZE][untouched].tobytes() == start[:SIZE][untouched].tobytes()
    assert not any(vector[untouched].any() for vector in state.vectors)


@pytest.mark.parametrize("clip_norm", [None, 20.0])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", ALL)
def test_lower_layers_move_in_deep_steps_alone_and_that_many_times_as_far(name, share, clip_norm):
    """Torch has an optimiser for them and one for the others; what both remember goes on in a second fit."""
    draw = Key.of("lower", name, share or 0).generator()
    (start,), given, mask = gradients(draw, 1), gradients(draw, 6), mask_of(share, draw)
    settings, stop = replace(ALL[name], clip_norm=clip_norm), SIZE // 3
    plan = FitPlan(trainable=mask, lower=LowerLayers(stop, 0.4))
    deep, found, state = [True, False, False, True, True, False], start.copy(), OptimiserState(())
    for part in (slice(0, 3), slice(3, 6)):
        gradient = np.empty_like(found)
        descent = Descent(found, gradient, SIZE, settings, plan, state)
        for one, all_move in zip(given[part], deep[part], strict=True):
            gradient[:] = one
            if not all_move:
                gradient[:stop] = np.nan  # it is not looked at
            descent.step(move_lower=all_move)
        state = descent.state()

    trained = np.ones(SIZE, bool) if mask is None else mask[:SIZE]
    groups = [trained & (np.arange(SIZE) < stop), trained & (np.arange(SIZE) >= stop)]
    weights = [torch.tensor(start[:SIZE][group], requires_grad=True) for group in groups]
    optimisers = [torch_optimiser(settings, one) for one in weights]
    for one, all_move in zip(given, deep, strict=True):
        for index, times in ((0, 2.5), (1, 1.0)):
            weights[index].grad = torch.tensor(one[:SIZE][groups[index]] * np.float32(times))
        moving = [0, 1] if all_move else [1]
        if clip_norm is not None and trained.any():
            torch.nn.utils.clip_grad_norm_([weights[index] for index in moving], clip_norm)
        for index in moving:
            optimisers[index].step()
    for group, one in zip(groups, weights, strict=True):
        np.testing.assert_allclose(found[:SIZE][group], one.detach().numpy(), rtol=2e-6, atol=2e-6)
    assert found[:SIZE][~trained].tobytes() == start[:SIZE][~trained].tobytes()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e30])
def test_a_gradient_without_a_norm_moves_nothing_and_is_told(wrong):
    start, given = np.ones(SIZE, np.float32), np.ones(SIZE, np.float32)
    given[7] = wrong
    weights, mask = start.copy(), np.ones(SIZE, np.bool_)
    settings = TrainingSection(clip_norm=1.0)
    with np.errstate(over="ignore"):
        norm = Descent(weights, given.copy(), SIZE, settings, FitPlan()).step()
        mask[7] = False
        without = Descent(start.copy(), given.copy(), SIZE, settings, FitPlan(trainable=mask)).step()
    assert not np.isfinite(norm)
    assert weights.tobytes() == start.tobytes()
    assert without == pytest.approx(np.sqrt(SIZE - 1))


@pytest.mark.parametrize("kept", ["round", "device"])
@pytest.mark.parametrize("share", [0.01, 0.16, 0.5, 1.0])
@pytest.mark.parametrize("name", ALL)
def test_it_holds_no_more_than_it_says(name, share, kept):
    size = 20 * BLOCK
    mask = Key.of("held").uniform(size) < share if share < 1 else np.ones(size, np.bool_)
    weights, gradient = np.ones(size, np.float32), np.ones(size, np.float32)
    settings = replace(ALL[name], optimiser_state=kept)
    memory = optimiser_footprint(settings)
    np.unique(mask, return_inverse=True)  # what numpy imports when it is first asked is not held by a descent
    tracemalloc.start()
    try:
        before = None
        if kept == "device":
            before = OptimiserState(tuple(np.zeros(size, np.float32) for _ in range(memory.per_stored)))
        descent = Descent(weights, gradient, size, settings, FitPlan(trainable=mask), before)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert descent is not None
    told, scratch = memory.copies(share) * weights.nbytes, 4 * BLOCK
    assert 0.95 * told <= held <= 1.05 * told + scratch + 20_000
