"""Computes the cost of a training step that computes only some tensors' gradients.

The cost counts multiplications of matrix products and convolutions: in the forward pass, in the gradients of
activations above the lowest trained layer, and in the gradients of trained weights. Each of the three costs
about the same. Frozen entries within a trained tensor save nothing: gradients of active rows alone gained a
tenth at best, and were slower on small networks (docs/ratios.md).
"""

from collections.abc import Collection, Iterator

import numpy as np

from fleetune.protocols.model.spec import FrozenTensor, MaskArray, ModelSpec, TensorSpec


def trained_tensors(trainable: MaskArray, spec: ModelSpec) -> frozenset[str]:
    """Return the names of the parameters with at least one entry in `trainable`, shape (spec.size,)."""
    parameters = (tensor.name for tensor in spec.tensors if tensor.kind != "stat")
    return frozenset(name for name in parameters if trainable[spec.slices[name]].any())


def step_products(spec: ModelSpec, tensors: Collection[str] | None = None) -> int:
    """Return the multiplications per sample of a step that computes the gradients of `tensors` (None: all).

    Layers are ordered as the module's parameters, backbone included.
    """
    total, passed = 0, False  # True once a trained tensor was seen below
    for tensor, can_train in _in_module_order(spec):
        wanted = can_train and (tensors is None or tensor.name in tensors)
        total += tensor.size * tensor.uses * (1 + passed + wanted)
        passed = passed or wanted
    return total


def _in_module_order(spec: ModelSpec) -> Iterator[tuple[TensorSpec | FrozenTensor, bool]]:
    """Yield all tensors in module order, each with True if it may train."""
    frozen = list(spec.frozen)
    for index, tensor in enumerate(spec.tensors):
        while frozen and frozen[0].before <= index:
            yield frozen.pop(0), False
        yield tensor, True
    yield from ((tensor, False) for tensor in frozen)


def below_largest(spec: ModelSpec) -> int:
    """Return the number of entries before the model's largest layer in the flat vector."""
    return max(spec.layers.values(), key=lambda place: place.stop - place.start, default=slice(0)).start or 0


def work_with_lower(spec: ModelSpec, stop: int, share: float) -> float:
    """Return a step's mean work relative to a full step, if entries before `stop` train in a share of the
    steps.

    See `LowerLayers`.
    """
    upper = np.arange(spec.size) >= stop
    return share + (1 - share) * compute_cost(spec, upper)


def compute_cost(spec: ModelSpec, trainable: MaskArray) -> float:
    """Return the work of a step that trains the entries in `trainable`, relative to a full step.

    `trainable` has the shape (spec.size,). The result is 1 if the spec does not list the model's
    multiplications.
    """
    whole = step_products(spec)
    return step_products(spec, trained_tensors(trainable, spec)) / whole if whole else 1.0
