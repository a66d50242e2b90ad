"""Selections: which entries of the flat vector are sent, trained or averaged.

There are six kinds, each with a small form on the wire. `mask(spec)` is the selection as booleans, shape
(spec.size,), True = selected. Running statistics are never selected.
"""

from collections.abc import Sequence
from functools import reduce
from typing import Annotated, Self

import numpy as np
from msgspec import Meta, Struct

from fleetune.protocols.bounds import Bits64, Label, Ratio
from fleetune.protocols.errors import PacketCorrupt, SettingError
from fleetune.protocols.model.spec import ALWAYS_ACTIVE, Axis, MaskArray, ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key

MAX_LAYERS = 4096


class _Masked(Struct, frozen=True):
    """Base class of selections that are counted by their mask."""

    def mask(self, spec: ModelSpec) -> MaskArray:
        raise NotImplementedError

    def count(self, spec: ModelSpec) -> int:
        return int(np.count_nonzero(self.mask(spec)))


class Everything(Struct, frozen=True, tag=True):
    """All parameters. It takes no bytes on the wire."""

    def mask(self, spec: ModelSpec) -> MaskArray:
        return _parameters(spec)

    def count(self, spec: ModelSpec) -> int:
        return spec.num_parameters


class Layers(Struct, frozen=True, tag=True):
    """All parameters of the named layers."""

    names: Annotated[tuple[Label, ...], Meta(max_length=MAX_LAYERS)]

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Return the selected entries. Raises PacketCorrupt if the model lacks a layer."""
        chosen = np.zeros(spec.size, dtype=bool)
        for name in self.names:
            chosen[_layer(spec, name)] = True
        return chosen

    def count(self, spec: ModelSpec) -> int:
        return sum(where.stop - where.start for where in (_layer(spec, name) for name in set(self.names)))


class Neurons(_Masked, frozen=True, tag=True):
    """All entries between randomly drawn neurons; both sides draw the same neurons from `key`.

    In each group of n neurons, `num_active(n, ratio)` are drawn, as a sample of `Key(key).child(group)`. An
    entry is selected if all neurons on its axes are drawn.
    """

    ratio: Ratio
    key: Bits64

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Return the selected entries. Raises PacketCorrupt if the ratio is outside (0, 1] or the key is
        invalid.
        """
        return neuron_mask(spec, draw_neurons(spec.groups, self.ratio, self.key))


class ChosenNeurons(_Masked, frozen=True, tag=True):
    """All entries between neurons that the sender chose; they are sent as one bit for each neuron."""

    active: MaskArray  # shape (sum(spec.groups),), one group after the other

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Return the selected entries. Raises PacketCorrupt if there is not one bit for each neuron of the
        model.
        """
        return neuron_mask(spec, self.by_group(spec))

    def by_group(self, spec: ModelSpec) -> list[MaskArray]:
        """Return the active neurons of each group, bool, shape (neurons,). Raises as `mask`."""
        if self.active.dtype != np.bool_ or self.active.shape != (sum(spec.groups),):
            raise PacketCorrupt(
                f"bitmap of shape {self.active.shape} for a model of {sum(spec.groups)} neurons"
            )
        return np.split(self.active, np.cumsum(spec.groups, dtype=np.intp)[:-1])


class Entries(_Masked, frozen=True, tag=True):
    """Any set of entries, sent as a bitmap over the parameters."""

    bitmap: MaskArray  # shape (spec.num_parameters,)

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Return the selected entries. Raises PacketCorrupt if the bitmap and the model differ in length."""
        if self.bitmap.dtype != np.bool_ or self.bitmap.shape != (spec.num_parameters,):
            raise PacketCorrupt(
                f"bitmap of shape {self.bitmap.shape} for a model of {spec.num_parameters} parameters"
            )
        return np.concatenate([self.bitmap, np.zeros(spec.size - spec.num_parameters, dtype=bool)])


class DrawnEntries(_Masked, frozen=True, tag=True):
    """A random fraction of the parameters; both sides draw the same entries from `start`.

    Each entry has a random position on a circle of 2**64 points: draw i of key 0 for entry i. The selected
    entries lie on the arc that begins at `start` and covers the fraction `share` of the circle. Every layer
    contributes about that fraction. Successive arcs select every entry in turn.
    """

    share: Ratio
    start: Bits64

    @classmethod
    def of_round(cls, share: float, number: int, key: Key) -> Self:
        """Return the entries of round `number`. Arcs of successive rounds are adjacent; `key` draws the first
        one.
        """
        return cls(share, (key.value + number * _arc(share)) % 2**64)

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Return the selected entries. Raises PacketCorrupt if the share or the start is out of range."""
        if not 0 < self.share <= 1 or not 0 <= self.start < 2**64:
            raise PacketCorrupt(
                f"DrawnEntries: share {self.share} and start {self.start}; expected a share in (0, 1] and a"
                " start below 2**64"
            )
        distance = Key(0).bits(spec.num_parameters) - np.uint64(self.start)  # modulo 2**64
        chosen = np.zeros(spec.size, dtype=bool)
        chosen[: spec.num_parameters] = distance < _arc(self.share) if self.share < 1 else True
        return chosen


Selection = Everything | Layers | Neurons | ChosenNeurons | Entries | DrawnEntries
Where = slice | MaskArray
"""Entries of the flat vector, as a range or a mask."""


def where(selection: Selection, spec: ModelSpec) -> Where:
    """Return the selected entries, as a range if they are contiguous: a range gives views instead of copies.

    Raises:
        PacketCorrupt: the selection does not fit the model.
    """
    if isinstance(selection, Everything):  # found without a mask, which takes a byte for each entry
        return slice(0, spec.num_parameters)
    mask = selection.mask(spec)
    first, count = int(np.argmax(mask)), int(np.count_nonzero(mask))
    return slice(first, first + count) if mask[first : first + count].all() else mask


def num_selected(entries: Where) -> int:
    """Return the number of entries that a range or a mask contains."""
    return entries.stop - entries.start if isinstance(entries, slice) else int(np.count_nonzero(entries))


def _arc(share: float) -> int:
    return int(share * 2.0**64)


def num_active(neurons: int, ratio: float) -> int:
    """Return the number of active neurons of a group at `ratio`: max(1, floor(ratio * neurons)).

    FedSPU section 3.1. Adding 1e-9 keeps 0.6 * 120 at 72 in binary arithmetic.
    """
    return max(1, int(ratio * neurons + 1e-9))


def draw_neurons(groups: Sequence[int], ratio: float, key: int) -> list[MaskArray]:
    """Draw the active neurons of each group: bool, shape (neurons,).

    Raises:
        PacketCorrupt: the ratio is outside (0, 1] or the key is no 64-bit number.
    """
    if not 0 < ratio <= 1 or not 0 <= key < 2**64:
        raise PacketCorrupt(
            f"neurons drawn at ratio {ratio} from key {key}; expected a ratio in (0, 1] and a key of 64 bits"
        )
    drawn = []
    for group, neurons in enumerate(groups):
        active = np.zeros(neurons, dtype=bool)
        active[Key(key).child(group).sample(num_active(neurons, ratio), neurons)] = True
        drawn.append(active)
    return drawn


def neuron_mask(spec: ModelSpec, active: Sequence[MaskArray], *, statistics: bool = False) -> MaskArray:
    """Return the entries between active neurons, bool, shape (spec.size,).

    FedSPU section 3.1 and Lemma 1: an entry is active if both neurons that it connects are active. Bias and
    norm parameters belong to their output neuron. Inputs and outputs of the network are always active.

    Args:
        spec: the model.
        active: the active neurons of each group, bool, shape (neurons,).
        statistics: True includes the running statistics of active neurons, which no selection contains.
    """
    parts = []
    for tensor in spec.tensors:
        if tensor.kind == "stat" and not statistics:
            parts.append(np.zeros(tensor.size, dtype=bool))
        else:
            parts.append(_tensor_mask(tensor, active).ravel())
    return np.concatenate(parts)


def expected_count(spec: ModelSpec, ratio: float) -> int:
    """Return the number of entries that `Neurons(ratio, ...)` selects, without drawing.

    The number is exact if each axis covers whole groups.

    Raises:
        SettingError: the ratio is outside (0, 1].
    """
    if not 0 < ratio <= 1:
        raise SettingError(f"ratio {ratio} must be above 0 and at most 1")
    total = 0.0
    for tensor in spec.tensors:
        if tensor.kind != "stat":
            pairs = zip(tensor.shape, tensor.axes, strict=True)
            total += float(np.prod([_axis_count(spec, size, axis, ratio) for size, axis in pairs]))
    return round(total)


def _parameters(spec: ModelSpec) -> MaskArray:
    chosen = np.zeros(spec.size, dtype=bool)
    chosen[: spec.num_parameters] = True
    return chosen


def _layer(spec: ModelSpec, name: str) -> slice:
    if name not in spec.layers:
        raise PacketCorrupt(f"layer {name!r} is not in model {spec.name!r}")
    return spec.layers[name]


def _tensor_mask(tensor: TensorSpec, active: Sequence[MaskArray]) -> MaskArray:
    along = [_axis_mask(size, axis, active) for size, axis in zip(tensor.shape, tensor.axes, strict=True)]
    if not along:
        return np.ones((), dtype=bool)
    return reduce(np.logical_and.outer, along)


def _axis_mask(size: int, axis: Axis, active: Sequence[MaskArray]) -> MaskArray:
    if not axis:
        return np.ones(size, dtype=bool)
    parts = [
        np.ones(span.count * span.repeat, dtype=bool)
        if span.group == ALWAYS_ACTIVE
        else np.repeat(active[span.group][span.start : span.start + span.count], span.repeat)
        for span in axis
    ]
    return np.concatenate(parts)


def _axis_count(spec: ModelSpec, size: int, axis: Axis, ratio: float) -> float:
    if not axis:
        return size
    count = 0.0
    for span in axis:
        share = 1.0
        if span.group != ALWAYS_ACTIVE:
            share = num_active(spec.groups[span.group], ratio) / spec.groups[span.group]
        count += span.count * span.repeat * share
    return count


def norm_layers(spec: ModelSpec) -> frozenset[str]:
    """Return the names of the layers that only normalise."""
    return frozenset(tensor.layer for tensor in spec.tensors if tensor.kind == "norm")


def split_at_head(spec: ModelSpec, count: int) -> tuple[Layers, Layers]:
    """Return the layers of the body and of the head: the last `count` layers with weights and their norms.

    Raises:
        SettingError: the body would have no layer with weights.
    """
    names, norms = tuple(spec.layers), norm_layers(spec)
    weighted = [name for name in names if name not in norms]
    if len(weighted) == 1:
        raise SettingError(
            f"method: it needs a body and a head, but of model {spec.name!r} only one layer trains,"
            f" {weighted[0]!r}; let more layers train (model.trainable), or choose another method"
        )
    if count >= len(weighted):
        raise SettingError(
            f"method: a head of {count} layers leaves no body of the {len(weighted)} layers with weights in"
            f" model {spec.name!r}; set at most {len(weighted) - 1}"
        )
    start = names.index(weighted[-count])
    return Layers(names[:start]), Layers(names[start:])
