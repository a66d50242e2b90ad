"""A model's first weights without torch, bit for bit those that torch draws.

Torch's generator is the Mersenne twister; a uniform float32 takes the lower 24 bits of one of its numbers
(ATen/core/DistributionsHelper.h). Layers of torch are filled with uniform numbers when they are made, in
that order, so the order and the bounds are all that has to be known.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.bundle.bundle import Recipe
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key

_BITS = 24


def draw_weights(recipe: Recipe, spec: ModelSpec, key: Key) -> FlatArray:
    """The weights of a model that is made with torch's generator at `key`, shape (spec.size,).

    Args:
        recipe: how they are drawn.
        spec: the model.
        key: its value's lower 32 bits seed the generator, as in torch.
    """
    weights = np.empty(spec.size, np.float32)
    views = {tensor.name: view for tensor, view in spec.views(weights)}
    twister = np.random.RandomState(key.value & 0xFFFFFFFF)
    for draw in recipe.draws:
        view = views[draw.tensor]
        view[...] = _uniform(twister, view.size, draw.bound).reshape(view.shape)
    for name, value in recipe.constants.items():
        views[name][...] = value
    return weights


def draw_convolutions(weights: FlatArray, spec: ModelSpec, key: Key) -> FlatArray:
    """`weights`, shape (spec.size,), with every convolution's drawn anew: normal, variance 2 / fan out.

    He et al. 2015 for ReLU; fan out is output channels times kernel positions. Each tensor from a key of its
    own name, by NumPy, whatever drew the rest.
    """
    drawn = weights.copy()
    for tensor, view in spec.views(drawn):
        if tensor.kind == "weight" and len(tensor.shape) > 2:
            fan_out = tensor.shape[0] * math.prod(tensor.shape[2:])
            values = key.child("kaiming", tensor.name).generator().standard_normal(tensor.shape)
            view[...] = values * math.sqrt(2 / fan_out)
    return drawn


def _uniform(twister: np.random.RandomState, count: int, bound: float) -> NDArray[np.float32]:
    """`count` numbers in [-bound, bound), rounded as torch rounds them."""
    low = np.float32(-bound)
    bits = twister.randint(0, 2**32, count, np.uint32) & np.uint32((1 << _BITS) - 1)
    width = np.float64(np.float32(bound) - low)
    return (bits * 2.0**-_BITS * width + np.float64(low)).astype(np.float32)
