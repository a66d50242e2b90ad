"""Which entries of the flat vector are sent, trained or averaged.

Six ways to say it, each with its mask over the vector, shape (spec.size,), True = selected, and each
as small on the wire as it can be. Running statistics are never selected.
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


class Everything(Struct, frozen=True, tag=True):
    """All parameters. Nothing is sent to say so."""

    def mask(self, spec: ModelSpec) -> MaskArray:
        return _parameters(spec)

    def count(self, spec: ModelSpec) -> int:
        return spec.num_parameters


class Layers(Struct, frozen=True, tag=True):
    """All parameters of some layers, by name."""

    names: Annotated[tuple[Label, ...], Meta(max_length=MAX_LAYERS)]

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Raises PacketCorrupt when a layer is not in the model."""
        chosen = np.zeros(spec.size, dtype=bool)
        for name in self.names:
            chosen[_layer(spec, name)] = True
        return chosen

    def count(self, spec: ModelSpec) -> int:
        return sum(where.stop - where.start for where in (_layer(spec, name) for name in set(self.names)))


class Neurons(Struct, frozen=True, tag=True):
    """Everything between randomly drawn neurons; both sides draw them alike from `key`.

    Of each group of n neurons, `num_active(n, ratio)` are drawn (a sample of `Key(key).child(group)`).
    An entry is selected if all neurons its axes belong to are.
    """

    ratio: Ratio
    key: Bits64

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Raises PacketCorrupt when the ratio is outside (0, 1] or the key is no 64-bit number."""
        return neuron_mask(spec, draw_neurons(spec.groups, self.ratio, self.key))

    def count(self, spec: ModelSpec) -> int:
        return int(np.count_nonzero(self.mask(spec)))


class ChosenNeurons(Struct, frozen=True, tag=True):
    """Everything between neurons that one side chose; they travel as a bitmap, a bit a neuron."""

    active: MaskArray  # shape (sum(spec.groups),), group after group

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Raises PacketCorrupt when there is not one bit for each neuron of the model."""
        return neuron_mask(spec, self.by_group(spec))

    def by_group(self, spec: ModelSpec) -> list[MaskArray]:
        """For each group, bool, shape (neurons,). Raises as `mask`."""
        if self.active.dtype != np.bool_ or self.active.shape != (sum(spec.groups),):
            raise PacketCorrupt(
                f"bitmap of shape {self.active.shape} for a model of {sum(spec.groups)} neurons"
            )
        return np.split(self.active, np.cumsum(spec.groups, dtype=np.intp)[:-1])

    def count(self, spec: ModelSpec) -> int:
        return int(np.count_nonzero(self.mask(spec)))


class Entries(Struct, frozen=True, tag=True):
    """Any entries; the mask travels as a bitmap over the parameters."""

    bitmap: MaskArray  # shape (spec.num_parameters,)

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Raises PacketCorrupt when the bitmap is not of the model's length."""
        if self.bitmap.dtype != np.bool_ or self.bitmap.shape != (spec.num_parameters,):
            raise PacketCorrupt(
                f"bitmap of shape {self.bitmap.shape} for a model of {spec.num_parameters} parameters"
            )
        return np.concatenate([self.bitmap, np.zeros(spec.size - spec.num_parameters, dtype=bool)])

    def count(self, spec: ModelSpec) -> int:
        return int(np.count_nonzero(self.mask(spec)))


class DrawnEntries(Struct, frozen=True, tag=True):
    """A share of the parameters, drawn entry by entry; both sides find them alike from `start`.

    Entry i has its place on a circle of 2**64, draw i of the key 0. Selected are those on the arc that begins
    at `start` and is `share` of the circle long, about that share of every layer. Arcs that follow each other
    take every entry in turn.
    """

    share: Ratio
    start: Bits64

    @classmethod
    def of_round(cls, share: float, number: int, key: Key) -> Self:
        """Those of a round: arcs of rounds that follow each other do, too. `key` says where the first is."""
        return cls(share, (key.value + number * _arc(share)) % 2**64)

    def mask(self, spec: ModelSpec) -> MaskArray:
        """Raises PacketCorrupt when the share is outside (0, 1] or the start no 64-bit number."""
        if not 0 < self.share <= 1 or not 0 <= self.start < 2**64:
            raise PacketCorrupt(f"entries drawn at share {self.share} from {self.start}: not possible")
        distance = Key(0).bits(spec.num_parameters) - np.uint64(self.start)  # modulo 2**64
        chosen = np.zeros(spec.size, dtype=bool)
        chosen[: spec.num_parameters] = distance < _arc(self.share) if self.share < 1 else True
        return chosen

    def count(self, spec: ModelSpec) -> int:
        return int(np.count_nonzero(self.mask(spec)))


Selection = Everything | Layers | Neurons | ChosenNeurons | Entries | DrawnEntries


def _arc(share: float) -> int:
    return int(share * 2.0**64)


def num_active(neurons: int, ratio: float) -> int:
    """How many of `neurons` are active at `ratio`: max(1, floor(ratio * neurons)).

    FedSPU section 3.1. The 1e-9 keeps 0.6 * 120 at 72 in binary arithmetic.
    """
    return max(1, int(ratio * neurons + 1e-9))


def draw_neurons(groups: Sequence[int], ratio: float, key: int) -> list[MaskArray]:
    """For each group of neurons, which are active: bool, shape (neurons,).

    Raises:
        PacketCorrupt: the ratio is outside (0, 1] or the key is no 64-bit number.
    """
    if not 0 < ratio <= 1 or not 0 <= key < 2**64:
        raise PacketCorrupt(f"neurons drawn at ratio {ratio} from key {key}: not possible")
    drawn = []
    for group, neurons in enumerate(groups):
        active = np.zeros(neurons, dtype=bool)
        active[Key(key).child(group).sample(num_active(neurons, ratio), neurons)] = True
        drawn.append(active)
    return drawn


def neuron_mask(spec: ModelSpec, active: Sequence[MaskArray], *, statistics: bool = False) -> MaskArray:
    """The entries between active neurons, shape (spec.size,).

    FedSPU section 3.1 and Lemma 1: an entry is active iff both neurons it connects are. Bias and norm
    parameters follow their output neuron; inputs and outputs of the network are always active.

    Args:
        spec: the model.
        active: for each group, bool, shape (neurons,).
        statistics: running statistics of active neurons, too, which no selection covers.
    """
    parts = []
    for tensor in spec.tensors:
        if tensor.kind == "stat" and not statistics:
            parts.append(np.zeros(tensor.size, dtype=bool))
        else:
            parts.append(_tensor_mask(tensor, active).ravel())
    return np.concatenate(parts)


def expected_count(spec: ModelSpec, ratio: float) -> int:
    """How many entries `Neurons(ratio, ...)` selects, without drawing; exact where axes span whole groups.

    Raises:
        SettingError: the ratio is outside (0, 1].
    """
    if not 0 < ratio <= 1:
        raise SettingError(f"ratio {ratio}: it must be in (0, 1]")
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
