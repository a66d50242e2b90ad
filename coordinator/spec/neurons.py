"""Records which neuron each position of a parameter belongs to, and which neurons are coupled.

Every entry of an activation has the number of its neuron, in an integer array of the same shape.
`coordinator.spec.neuron_trace` has the rules for each operation.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from fleetune.protocols.model.spec import ALWAYS_ACTIVE, Axis, Span

FIXED = 0  # always active: inputs and outputs of the network, and inputs of unknown operations
FREE = -1  # constants: they belong to no neuron, and couple none


# parameters, each with the axes that a weight has from it
Parts = Sequence[tuple[Tensor, Collection[int]]]


class Neurons:
    """The neurons of a network's activations and of the axes of its parameters.

    Args:
        tensors: parameters and running statistics of the module, by name.
        frozen: frozen tensors of the module, for which only the uses are counted.
        buffers: further tensors of the module, which no training changes.

    Attributes:
        uses: how often each entry of a parameter was multiplied, over all samples, by name.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor] = MappingProxyType({}),
        buffers: Iterable[Tensor] = (),
    ) -> None:
        self._tensors = tensors
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._counted = self._names | {id(tensor): name for name, tensor in frozen.items()}
        self.uses = dict.fromkeys((*tensors, *frozen), 0)
        # tensors with their numbers and versions; it holds the tensors, so that ids stay unique
        self._numbers: dict[int, tuple[Tensor, Tensor, int]] = {}
        # for a weight that is computed from parameters: the axes that it has from each of them
        self._made_of: dict[int, tuple[Tensor, Parts]] = {}
        self._axes: dict[tuple[str, int], Tensor] = {}
        self._layers: list[range] = []
        # for each neuron, a lower number of the same neuron, or its own number (union-find)
        self._parent = [FIXED]
        for constant in (*frozen.values(), *buffers):
            self.free(constant)

    def new(self, count: int) -> Tensor:
        """Return numbers for a layer of new neurons, shape (count,)."""
        if count == 1:  # a method always keeps one neuron, so this one must not couple those that it scales
            return torch.tensor([FREE])
        layer = range(len(self._parent), len(self._parent) + count)
        self._layers.append(layer)
        self._parent.extend(layer)
        return torch.tensor(layer)

    def note(self, values: object, numbers: object) -> None:
        """Store the numbers of tensors, each in the shape of its tensor."""
        for tensor, its_numbers in zip(flat(values), flat(numbers), strict=True):
            self._numbers[id(tensor)] = (tensor, its_numbers, _version(tensor))

    def free(self, values: object) -> None:
        """Note tensors as constants."""
        for tensor in flat(values):
            self.note(tensor, torch.tensor(FREE).expand(tensor.shape))

    def is_free(self, values: object) -> bool:
        """True if no tensor in these values depends on a neuron or on an input."""
        return all(bool((self.of(tensor) == FREE).all()) for tensor in flat(values))

    def of(self, tensor: Tensor) -> Tensor:
        """Return the neuron of every entry of a tensor, in the tensor's shape."""
        if id(tensor) in self._numbers:
            _, numbers, version = self._numbers[id(tensor)]
            # a constant into which something was written by a view of it
            return numbers if version == _version(tensor) else numbers.clamp(min=FIXED)
        if id(tensor) in self._made_of:
            for parameter, _ in self._made_of[id(tensor)][1]:
                self.of(parameter)
        elif id(tensor) not in self._names:
            return torch.tensor(FIXED).expand(tensor.shape)
        for axis, size in enumerate(tensor.shape):  # a parameter that is used otherwise than by its layer
            self.own(tensor, axis, torch.full((size,), FIXED))
        return torch.tensor(FREE).expand(tensor.shape)

    def along(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the neuron at each position of `axis`, shape (size,); several at one position become one."""
        (rows,) = compact(self.of(tensor).movedim(axis, 0), start=1)
        return self.merged(rows.reshape(len(rows), -1), 1)

    def merged(self, numbers: Tensor, axis: int) -> Tensor:
        """Return numbers without `axis`, along which all neurons become one."""
        first = numbers.amax(dim=axis)
        self.join(first.unsqueeze(axis).expand_as(numbers), numbers)
        return first

    def would_be_one(self, numbers: Tensor) -> bool:
        """True if merging along the last axis made all neurons in these numbers a single one.

        A method always keeps a single neuron. So a sum over them is always active, and need not couple them.
        """
        (numbers,) = compact(numbers)
        if not numbers.numel():
            return False
        first = self._roots(numbers.reshape(-1, numbers.shape[-1])[0])
        return len(first) > 1 and FIXED not in first and first == self._roots(numbers)

    def _roots(self, numbers: Tensor) -> set[int]:
        found = np.unique(numbers.numpy())
        return {self._root(number) for number in found.tolist() if number != FREE}

    def are_equal_along(self, tensor: Tensor, axis: int) -> bool:
        """True if all entries along `axis` have the same neuron."""
        (numbers,) = compact(self.of(tensor).movedim(axis, 0))
        numbers = numbers.reshape(len(numbers), -1)
        differ = numbers != numbers[:1]
        pairs = zip(numbers[differ].tolist(), numbers[:1].expand_as(numbers)[differ].tolist(), strict=True)
        return all(self._root(one) == self._root(other) for one, other in pairs if FREE not in (one, other))

    def own(self, tensor: Tensor | None, axis: int, numbers: Tensor) -> None:
        """Assign positions on `axis` of a parameter to neurons, shape (size,).

        For a weight that is computed from parameters, this assigns the positions of those.
        """
        if tensor is None:
            return
        for parameter, axes in self._parts_of(tensor):
            if id(parameter) in self._names and axis in axes:
                numbers = numbers.clamp(min=FIXED)
                self.join(self._axes.setdefault((self._names[id(parameter)], axis), numbers), numbers)

    def make(self, weight: Tensor, parts: Parts) -> None:
        """Store the parameters from which a weight is computed."""
        self._made_of[id(weight)] = (weight, parts)

    def _parts_of(self, tensor: Tensor) -> Parts:
        return self._made_of.get(id(tensor), (tensor, [(tensor, range(tensor.ndim))]))[1]

    def is_parameter(self, tensor: Tensor) -> bool:
        """True if a tensor is a parameter, or a weight that is computed from parameters."""
        return any(id(part) in self._names for part, _ in self._parts_of(tensor))

    def layer(self, result: Tensor, axis: int, numbers: Tensor, *owned: Tensor | None) -> Tensor:
        """Return the numbers of a result that has one neuron for each position of `axis`.

        The first axes of the parameters in `owned` belong to the same neurons.
        """
        for parameter in owned:
            self.own(parameter, 0, numbers)
        shape = [1] * result.ndim
        shape[axis] = len(numbers)
        return numbers.view(shape).expand(result.shape)

    def use(self, weight: Tensor, times: int) -> None:
        """Count the uses of each entry of a weight."""
        for tensor, _ in self._parts_of(weight):
            if id(tensor) in self._counted and tensor.shape == weight.shape:
                self.uses[self._counted[id(tensor)]] += times

    def join(self, some: Tensor, others: Tensor) -> None:
        """Make the neurons in two arrays of the same shape equal, entry by entry."""
        some, others = compact(some, others)
        differ = (some != others) & (some != FREE) & (others != FREE)
        count = len(self._parent)
        for pair in np.unique((some[differ] * count + others[differ]).numpy()).tolist():
            low, high = sorted(map(self._root, divmod(pair, count)))
            self._parent[high] = low

    def fix(self, values: object) -> None:
        """Make every neuron in these tensors always active."""
        for tensor in flat(values):
            numbers = self.of(tensor)
            self.join(numbers, torch.tensor(FIXED).expand_as(numbers))

    def describe(self) -> tuple[tuple[int, ...], dict[str, tuple[Axis, ...]]]:
        """Return the number of neurons of each group, in the order of the forward pass, and each tensor's
        axes.
        """
        roots = {key: [self._root(number) for number in axis.tolist()] for key, axis in self._axes.items()}
        used = {root for axis in roots.values() for root in axis} - {FIXED}
        groups = [[one for one in layer if one in used] for layer in self._layers]
        groups = [members for members in groups if len(members) > 1]  # a method always keeps one of them
        places = {one: (group, at) for group, members in enumerate(groups) for at, one in enumerate(members)}
        axes = {
            name: tuple(
                _spans([places.get(root) for root in roots.get((name, axis), ())])
                for axis in range(tensor.ndim)
            )
            for name, tensor in self._tensors.items()
        }
        return tuple(map(len, groups)), axes

    def _root(self, number: int) -> int:
        while self._parent[number] != number:
            self._parent[number] = number = self._parent[self._parent[number]]
        return number


def flat(values: object) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dictionaries."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from flat(value)
    elif isinstance(values, dict):
        yield from flat(list(values.values()))


def compact(*numbers: Tensor, start: int = 0) -> tuple[Tensor, ...]:
    """Return the same arrays without the repetitions that all of them have along an axis from `start`."""
    for axis in range(start, numbers[0].ndim):
        if all(each.shape[axis] > 1 and each.stride(axis) == 0 for each in numbers):
            numbers = tuple(each.narrow(axis, 0, 1) for each in numbers)
    return numbers


def _version(tensor: Tensor) -> int:
    """Return how often something was written into a tensor or a view of it."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name for it


def _spans(places: Sequence[tuple[int, int] | None]) -> Axis:
    """Return an axis from each position's (group, neuron), or None where it is always active."""
    if not any(places):
        return ()
    spans: list[Span] = []
    for place, positions in groupby(places):
        repeat = len(list(positions))
        if place is None:
            spans.append(Span(ALWAYS_ACTIVE, 0, repeat))
        elif spans and (spans[-1].group, spans[-1].start + spans[-1].count, spans[-1].repeat) == (
            *place,
            repeat,
        ):
            spans[-1] = replace(spans[-1], count=spans[-1].count + 1)
        else:
            spans.append(Span(*place, 1, repeat))
    return tuple(spans)
