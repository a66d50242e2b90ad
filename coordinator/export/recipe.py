"""How a model's first weights can be drawn without torch, found by trying."""

import math
from collections.abc import Iterator

import numpy as np
from torch import nn

from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.protocols.bundle.bundle import Recipe, Uniform
from fleetune.protocols.bundle.first_weights import draw_weights
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.randomness import Key

_DRAWN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRIALS = (Key.of("fleetune", "recipe", 0), Key.of("fleetune", "recipe", 1))


def recipe_of(spec: ModelSpec, module: nn.Module) -> Recipe | None:
    """The recipe of a model whose layers are filled as torch fills them; None: it is filled otherwise.

    A recipe is tried: it draws the very bits that torch draws, or there is none.
    """
    known = {tensor.name for tensor in spec.tensors}
    draws = tuple(one for one in _draws(module) if one.tensor in known)
    drawn = {one.tensor for one in draws}
    weights = [draw(spec.name, spec.input_shape, spec.num_classes, key)[1] for key in _TRIALS]
    constants = {
        tensor.name: float(view.flat[0])
        for tensor, view in spec.views(weights[0])
        if tensor.name not in drawn
    }
    recipe = Recipe(draws, constants)
    same = all(
        np.array_equal(draw_weights(recipe, spec, key), drawn_by_torch)
        for key, drawn_by_torch in zip(_TRIALS, weights, strict=True)
    )
    return recipe if same else None


def _draws(module: nn.Module) -> Iterator[Uniform]:
    """In the order in which the layers are made, as a rule."""
    for path, layer in module.named_modules():
        if isinstance(layer, _DRAWN):
            fan_in = layer.weight[0].numel()
            gain = math.sqrt(2 / (1 + math.sqrt(5) ** 2))
            yield Uniform(f"{path}.weight", math.sqrt(3) * (gain / math.sqrt(fan_in)))
            if layer.bias is not None:
                yield Uniform(f"{path}.bias", 1 / math.sqrt(fan_in))
