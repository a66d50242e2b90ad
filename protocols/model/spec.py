"""The fleet's model as one flat float32 vector, and the meaning of every entry.

The vector holds all trainable parameters in module order, so that a layer is a slice. After them it holds the
running statistics of normalisation layers. These belong to a device's personal model and never leave it: no
selection covers them.
"""

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from fleetune.protocols.bounds import MAX_NUMBER, Label
from fleetune.protocols.model.interface import PLAIN, Interface

FlatArray = NDArray[np.float32]
MaskArray = NDArray[np.bool_]
Kind = Literal["weight", "bias", "norm", "stat"]

ALWAYS_ACTIVE = -1
RUNNING_STATISTICS = ("running_mean", "running_var")  # names as in torch
MAX_AXES = 8
MAX_TENSORS = 20_000
MAX_GROUPS = 20_000
MAX_SPANS = 20_000  # positions on one axis
Size = Annotated[int, Meta(ge=0, le=2**40)]
Shape = Annotated[tuple[Size, ...], Meta(max_length=MAX_AXES)]
Dimension = Size | Literal["n"]  # "n" stands for the number of samples
Dimensions = Annotated[tuple[Dimension, ...], Meta(max_length=MAX_AXES)]
_IDENTITY = ("name", "shape", "kind", "layer", "axes")  # axes of a tensor


@dataclass(frozen=True)
class Span:
    """Consecutive positions on one axis that belong to neurons `start`..`start + count - 1` of a group.

    Each neuron has `repeat` consecutive positions: behind a flatten, channel c owns `repeat` consecutive
    columns. `group` is ALWAYS_ACTIVE for positions of no group (inputs, outputs).
    """

    group: Annotated[int, Meta(ge=ALWAYS_ACTIVE, le=MAX_NUMBER)]
    start: Size
    count: Size
    repeat: Size = 1


Axis = Annotated[
    tuple[Span, ...], Meta(max_length=MAX_SPANS)
]  # in the order of positions; empty: the whole axis is always active


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the model.

    Attributes:
        name: name in the module's `state_dict`.
        shape: shape in the module.
        kind: "weight" and "bias" of linear and convolutional layers and embeddings, "norm" for the
            learnable parameters of normalisation layers, "stat" for running statistics.
        layer: path of the module that owns it; tensors of one layer are neighbours.
        axes: for each axis, the neurons that own its positions.
        uses: multiplications with each of its entries in the forward pass of one sample: the output positions
            of a convolution, 1 for a linear layer behind a flatten; 0 for none (biases, norms, lookups) or
            unknown. Used only to predict the cost of training (see `protocols.model.compute_cost`).
    """

    name: Label
    shape: Shape
    kind: Kind
    layer: Label
    axes: Annotated[tuple[Axis, ...], Meta(max_length=MAX_AXES)]
    uses: Annotated[int, Meta(ge=0, le=2**60)] = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class FrozenTensor:
    """A tensor that no device trains, so it is not part of the flat vector.

    Attributes:
        name, shape: as in the module.
        uses: as in `TensorSpec`.
        before: number of the spec's parameters that precede it in the module.
    """

    name: Label
    shape: Shape
    uses: Annotated[int, Meta(ge=0, le=2**60)] = 0
    before: Annotated[int, Meta(ge=0, le=MAX_TENSORS)] = 0

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters (LoRA, Hu et al. 2021): each of these layers computes W x + scale * B A x.

    A and B are separate layers, <layer>.lora_a and <layer>.lora_b; B A has rank `rank`.
    """

    layers: Annotated[tuple[Label, ...], Meta(max_length=MAX_TENSORS)]
    rank: Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
    scale: Annotated[float, Meta(gt=0, le=MAX_NUMBER)]


@dataclass(frozen=True)
class Backbone:
    """The frozen part of a model: frozen parameters, and statistics of norms in evaluation mode.

    Its values are one file, which is sent once and stored under its digest
    (`protocols.model.backbone_file`).

    Attributes:
        tensors: frozen tensors in the file's order.
        adapters: adapters added to the module; None for none.
        digest: BLAKE2b-128 of the file as 32 hex digits; "" if not yet known.
        weights: storage of tensors with two or more axes; unset for float32.
    """

    tensors: Annotated[tuple[FrozenTensor, ...], Meta(max_length=MAX_TENSORS)]
    adapters: Adapters | None = None
    digest: Annotated[str, Meta(pattern="^([0-9a-f]{32})?$")] = ""
    weights: Literal["int8"] | UnsetType = UNSET


@dataclass(frozen=True)
class ModelSpec:
    """The description of a model on which both sides must agree; it is sent to each device once.

    Attributes:
        name: the model's name or `module:function`.
        tensors: trainable parameters in module order, then statistics.
        groups: number of neurons of each coupled group.
        input_shape: shape of one sample, without the batch axis.
        num_classes: number of labels, 0..num_classes-1.
        backbone: the frozen part; unset if there is none.
        interface: the model's inputs, if there are several, and its output; unset: it takes one array, and
            its output is found. See `reads`.
    """

    name: Label
    tensors: Annotated[tuple[TensorSpec, ...], Meta(max_length=MAX_TENSORS)]
    groups: Annotated[tuple[Size, ...], Meta(max_length=MAX_GROUPS)]
    input_shape: Shape
    num_classes: Size
    backbone: Backbone | UnsetType = UNSET
    interface: Interface | UnsetType = UNSET

    @property
    def reads(self) -> Interface:
        """The model's interface."""
        return self.interface if isinstance(self.interface, Interface) else PLAIN

    @property
    def frozen(self) -> tuple[FrozenTensor, ...]:
        """The tensors of the backbone, if there is one."""
        return self.backbone.tensors if isinstance(self.backbone, Backbone) else ()

    @cached_property
    def size(self) -> int:
        """Length of the flat vector, running statistics included."""
        return sum(tensor.size for tensor in self.tensors)

    @cached_property
    def num_parameters(self) -> int:
        """Length of the trainable part, which comes first."""
        return sum(tensor.size for tensor in self.tensors if tensor.kind != "stat")

    @cached_property
    def share_in_groups(self) -> float:
        """Share of the parameters that belong to a neuron of a group."""
        tensors = [tensor for tensor in self.tensors if tensor.kind != "stat"]
        return sum(tensor.size for tensor in tensors if any(tensor.axes)) / (self.num_parameters or 1)

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Each tensor's slice of the flat vector."""
        found, start = {}, 0
        for tensor in self.tensors:
            found[tensor.name] = slice(start, start + tensor.size)
            start += tensor.size
        return found

    @cached_property
    def layers(self) -> dict[str, slice]:
        """Each layer's slice of trainable parameters, in module order."""
        found: dict[str, slice] = {}
        for tensor in self.tensors:
            if tensor.kind != "stat":
                here = self.slices[tensor.name]
                start = found[tensor.layer].start if tensor.layer in found else here.start
                found[tensor.layer] = slice(start, here.stop)
        return found

    @cached_property
    def hash(self) -> str:
        """Hash of 16 hex digits; models with equal hashes are interchangeable.

        The hash covers all fields except the name and `uses`; of the backbone, it covers adapters and digest.
        """
        tensors = [{name: getattr(tensor, name) for name in _IDENTITY} for tensor in self.tensors]
        parts = (tensors, self.groups, self.input_shape, self.num_classes)
        # on another backbone the same parameters have another meaning
        if isinstance(self.backbone, Backbone):
            parts = (*parts, self.backbone.adapters, self.backbone.digest)  # type: ignore[assignment]
        content = msgspec.msgpack.encode(parts)
        return hashlib.blake2b(content, digest_size=8).hexdigest()

    def views(self, weights: NDArray[np.float32]) -> Iterator[tuple[TensorSpec, NDArray[np.float32]]]:
        """Yield each tensor with its part of `weights`, shape (size,), as a view in the tensor's shape."""
        for tensor in self.tensors:
            yield tensor, weights[self.slices[tensor.name]].reshape(tensor.shape)
