"""Draws a model's first weights without torch, bit for bit as torch draws them.

Torch's generator is the Mersenne twister. A uniform float32 takes the lower 24 bits of one of its numbers
(ATen/core/DistributionsHelper.h). Torch fills its layers with uniform numbers in the order in which they are
created, so the order and the bounds suffice.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.bundle.bundle import Recipe
from fleetune.protocols.model.spec import Backbone, FlatArray, ModelSpec
from fleetune.protocols.randomness import Key

_BITS = 24


def draw_weights(recipe: Recipe, spec: ModelSpec, key: Key) -> FlatArray:
    """Return the weights that torch would draw with a generator seeded by `key`, shape (spec.size,).

    Args:
        recipe: order and bounds of the draws.
        spec: the model.
        key: the lower 32 bits of its value seed the generator, as in torch.
    """
    weights = np.empty(spec.size, np.float32)
    _fill(recipe, spec, key, {tensor.name: view for tensor, view in spec.views(weights)})
    return weights


def draw_frozen(recipe: Recipe, spec: ModelSpec, key: Key) -> dict[str, FlatArray]:
    """Return the tensors of a model's backbone, drawn in the same way; empty if the recipe does not cover
    them.
    """
    if not isinstance(spec.backbone, Backbone):
        return {}
    named = {draw.tensor for draw in recipe.draws} | set(recipe.constants)
    if not named >= {tensor.name for tensor in spec.backbone.tensors}:
        return {}
    frozen = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in spec.backbone.tensors}
    _fill(recipe, spec, key, frozen)
    return frozen


def _fill(recipe: Recipe, spec: ModelSpec, key: Key, views: Mapping[str, FlatArray]) -> None:
    """Make all draws of the recipe in order, and store those whose tensor is in `views`."""
    sizes = {tensor.name: tensor.size for tensor in spec.tensors}
    sizes |= {tensor.name: tensor.size for tensor in spec.frozen}
    twister = np.random.RandomState(key.value & 0xFFFFFFFF)
    for draw in recipe.draws:
        numbers = _uniform(twister, sizes[draw.tensor], draw.bound)
        if draw.tensor in views:
            views[draw.tensor][...] = numbers.reshape(views[draw.tensor].shape)
    for name in recipe.constants.keys() & views.keys():
        views[name][...] = recipe.constants[name]


def draw_convolutions(weights: FlatArray, spec: ModelSpec, key: Key) -> FlatArray:
    """Return a copy of `weights`, shape (spec.size,), with new normal weights in every convolution.

    Their variance is 2 / fan out.

    He et al. 2015 for ReLU; fan out is output channels times kernel positions. NumPy draws each tensor from a
    key with the tensor's name, so the other tensors do not matter.
    """
    drawn = weights.copy()
    for tensor, view in spec.views(drawn):
        if tensor.kind == "weight" and len(tensor.shape) > 2:
            fan_out = tensor.shape[0] * math.prod(tensor.shape[2:])
            values = key.child("kaiming", tensor.name).generator().standard_normal(tensor.shape)
            view[...] = values * math.sqrt(2 / fan_out)
    return drawn


def draw_adapters(weights: FlatArray, spec: ModelSpec, key: Key) -> FlatArray:
    """Return a copy of `weights`, shape (spec.size,), with A of every adapter drawn and B zero.

    The model's output does not change.

    A is uniform in [-1, 1] over the square root of A's inputs, as in the authors' code (loralib: Kaiming
    uniform with a = sqrt 5). The paper says Gaussian and gives no width. NumPy draws each adapter from a key
    with the layer's name.
    """
    if not isinstance(spec.backbone, Backbone) or spec.backbone.adapters is None:
        return weights
    drawn = weights.copy()
    views = {tensor.name: view for tensor, view in spec.views(drawn)}
    for layer in spec.backbone.adapters.layers:
        a, b = (views[f"{layer}.{leaf}.weight"] for leaf in ("lora_a", "lora_b"))
        numbers = key.child("adapter", layer).uniform(a.size).reshape(a.shape)
        a[...] = (2 * numbers - 1) / math.sqrt(math.prod(a.shape[1:]))
        b[...] = 0
    return drawn


def _uniform(twister: np.random.RandomState, count: int, bound: float) -> NDArray[np.float32]:
    """Return `count` numbers in [-bound, bound), rounded as torch rounds them."""
    low = np.float32(-bound)
    bits = twister.randint(0, 2**32, count, np.uint32) & np.uint32((1 << _BITS) - 1)
    width = np.float64(np.float32(bound) - low)
    return (bits * 2.0**-_BITS * width + np.float64(low)).astype(np.float32)
