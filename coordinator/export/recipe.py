"""Finds out how a model's first weights can be drawn without torch."""

import math
from collections.abc import Iterator, Mapping

import numpy as np
from torch import nn

from fleetune.coordinator.spec.spec_from_torch import drawn, weights_of
from fleetune.protocols.bundle.bundle import Recipe, Uniform
from fleetune.protocols.bundle.first_weights import draw_frozen, draw_weights
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.model.torch_backbone import frozen_values
from fleetune.protocols.randomness import Key

_DRAWN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRIALS = (Key.of("fleetune", "recipe", 0), Key.of("fleetune", "recipe", 1))


def recipe_of(spec: ModelSpec, module: nn.Module) -> Recipe | None:
    """Return the recipe that draws a model's first weights without torch; None if there is none.

    A recipe is returned only if it draws the same bits as torch for two keys.
    """
    known = {tensor.name for tensor in spec.tensors} | {tensor.name for tensor in spec.frozen}
    draws = tuple(one for one in _draws(module) if one.tensor in known)
    random = {one.tensor for one in draws}
    trial = _drawn(spec, _TRIALS[0])
    recipe = Recipe(draws, {name: float(one.flat[0]) for name, one in trial.items() if name not in random})
    same = _draws_the_same(recipe, spec, _TRIALS[0], trial)
    if same and _draws_the_same(recipe, spec, _TRIALS[1], _drawn(spec, _TRIALS[1])):
        return recipe
    return None


def _drawn(spec: ModelSpec, key: Key) -> dict[str, FlatArray]:
    """Return all tensors of a model as torch draws them, by name."""
    module = drawn(spec.name, spec.input_shape, spec.num_classes, key, spec.reads)
    weights = weights_of(spec, module)
    return {tensor.name: view for tensor, view in spec.views(weights)} | frozen_values(spec, module)


def _draws_the_same(recipe: Recipe, spec: ModelSpec, key: Key, trial: Mapping[str, FlatArray]) -> bool:
    weights = draw_weights(recipe, spec, key)
    found = {tensor.name: view for tensor, view in spec.views(weights)} | draw_frozen(recipe, spec, key)
    return found.keys() == trial.keys() and all(np.array_equal(found[name], trial[name]) for name in found)


def _draws(module: nn.Module) -> Iterator[Uniform]:
    """Yield the random tensors in the order in which layers are usually made."""
    for path, layer in module.named_modules():
        if isinstance(layer, _DRAWN):
            fan_in = layer.weight[0].numel()
            gain = math.sqrt(2 / (1 + math.sqrt(5) ** 2))
            yield Uniform(f"{path}.weight", math.sqrt(3) * (gain / math.sqrt(fan_in)))
            if layer.bias is not None:
                yield Uniform(f"{path}.bias", 1 / math.sqrt(fan_in))
