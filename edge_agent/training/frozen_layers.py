"""A torch module's forward pass from given features on, without what was computed below them.

Forward passes are watched, call by call (torch's functions and the tensors that go in and out). A call is
*above* when something that trains goes into it, or when it draws random numbers; what a call below hands to
one above is a feature. A replay lets the module's own code run again, but calls below compute nothing: they
give the features, or zeros of the right shape that take no memory. Where the module's calls differ from pass
to pass there is no replay.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fleetune.edge_agent.training.gpu.torch_device import for_numpy

_SIZES = (3, 5)
_BELOW, _OTHER = "below", "other"
_DROPS = frozenset(
    name for name in dir(functional) if "dropout" in name
)  # in evaluation too: one boundary for both


@dataclass(frozen=True)
class _Result:
    """A tensor that a call gave; in its shape (times, True) stands for times the number of samples."""

    shape: tuple[tuple[int, bool], ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Pass:
    """A forward pass in one mode.

    Attributes:
        names: of the functions that it calls.
        below: the tensors that calls below give, by call.
        places: of the features: which call gives each, and which of its results it is.
    """

    names: tuple[str, ...]
    below: dict[int, tuple[_Result, ...]]
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Feature:
    """An array at the boundary.

    Attributes:
        shape: of one sample's, in the order of its numbers.
        order: of its axes behind the samples', as torch has them, in `shape`.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Replay:
    """How to go on from features.

    Attributes:
        passes: in training, and in evaluation.
        features: what goes from below to above, in order.
        input_shape: of one sample.
        dtype: of the samples.
        device: where the module computes.
    """

    passes: dict[bool, _Pass]
    features: tuple[Feature, ...]
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Numbers a sample."""
        return sum(one.size for one in self.features)

    def compute_features(self, module: nn.Module, x: Tensor) -> NDArray[np.float32]:
        """The features of samples, shape (n, size). Raises ReplayDiffers."""
        module.eval()
        with torch.no_grad(), _FeatureRecorder(self.passes[False]) as taking:
            module(x)
        rows = [
            taking.found[index].permute(0, *(1 + axis for axis in one.order)).reshape(len(x), -1)
            for index, one in enumerate(self.features)
        ]
        array: NDArray[np.float32] = for_numpy(torch.cat(rows, 1)).numpy()
        return array

    def forward(self, module: nn.Module, features: NDArray[np.float32]) -> Tensor:
        """What the module gives, in its present mode, for samples with these features, shape (n, size).

        Raises:
            ReplayDiffers: it calls other functions than it did.
        """
        tensors, start = [], 0
        for one in self.features:
            columns = torch.from_numpy(features[:, start : start + one.size])
            rows = columns.to(self.device).reshape(-1, *one.shape)
            tensors.append(rows.permute(0, *(1 + one.order.index(axis) for axis in range(len(one.order)))))
            start += one.size
        x = torch.zeros((), dtype=self.dtype, device=self.device).expand(len(features), *self.input_shape)
        with _FeatureReplayer(self.passes[module.training], tensors):
            logits: Tensor = module(x)
        return logits


class ReplayDiffers(Exception):  # noqa: N818 - it reports what was seen
    """A forward pass calls other functions than those that were watched."""


def record_boundary(module: nn.Module, x: Callable[[int], Tensor]) -> Replay | None:
    """Look at forward passes in both modes; the module is left in evaluation mode, its statistics unmoved.

    Args:
        module: whose trained parameters require a gradient, and no others do.
        x: samples of a given number, each time the same.

    Returns:
        None: samples themselves go into what trains, or passes differ.
    """
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with torch.random.fork_rng(devices=[]):
            return _recorded_boundary(module, x)
    finally:
        module.eval()
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(before[name])


def _recorded_boundary(module: nn.Module, x: Callable[[int], Tensor]) -> Replay | None:
    passes: dict[bool, _Pass] = {}
    found: dict[bool, tuple[Feature, ...]] = {}
    for training in (True, False):
        module.train(training)
        few, many = (_one_pass(module, x(size)) for size in _SIZES)
        described = None if few.fed_with_samples else _compare_passes(few, many)
        if described is None:
            return None
        passes[training], found[training] = described
    if found[True] != found[False] or not found[True]:
        return None
    replay = Replay(passes, found[True], tuple(x(1).shape[1:]), x(1).dtype, x(1).device)
    return replay if _has_equal_outputs(replay, module, x(_SIZES[0])) else None


def _one_pass(module: nn.Module, x: Tensor) -> "_CallRecorder":
    watching = _CallRecorder(x)
    with torch.enable_grad(), watching:
        module(x)
    return watching


def _has_equal_outputs(replay: Replay, module: nn.Module, x: Tensor) -> bool:
    """Whether a replay ends where the module ends, in both modes."""
    try:
        features = replay.compute_features(module, x)
        for training in (False, True):
            module.train(training)
            with torch.no_grad():
                torch.manual_seed(0)
                wanted = module(x)
                torch.manual_seed(0)
                found = replay.forward(module, features)
            if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
                return False
    except ReplayDiffers:
        return False
    return True


class _CallRecorder(TorchFunctionMode):
    """One forward pass, call by call.

    Attributes:
        names: of the functions.
        results: of each call, its tensors.
        kinds: of each call, whether it is below and gives a tensor.
        handed: (call, place) of what goes from below to above.
        fed_with_samples: a sample itself does.
    """

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.names: list[str] = []
        self.results: list[tuple[Tensor, ...]] = []
        self.kinds: list[str] = []
        self.handed: dict[tuple[int, int], None] = {}
        self.fed_with_samples = False
        self._x = x
        self._above: dict[int, Tensor] = {}
        self._below: dict[int, tuple[Tensor, tuple[int, int]]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = list(_flat((args, kwargs)))
        name = getattr(func, "__name__", "")
        result = func(*args, **kwargs)
        tensors = tuple(_flat(result))
        above = any(id(one) in self._above or one.requires_grad for one in given)
        of_samples = any(one is self._x or id(one) in self._below for one in given)
        above = above or (of_samples and name in _DROPS)
        if tensors and above:
            self._hand_over(given)
            self._above |= {id(one): one for one in tensors}
        elif tensors and of_samples:
            call = len(self.names)
            self._below |= {id(one): (one, (call, place)) for place, one in enumerate(tensors)}
        self.names.append(name)
        self.kinds.append(_BELOW if tensors and of_samples and not above else _OTHER)
        self.results.append(tensors)
        return result

    def _hand_over(self, given: list[Tensor]) -> None:
        for one in given:
            if one is self._x:
                self.fed_with_samples = True
            elif id(one) in self._below and id(one) not in self._above:
                self.handed[self._below[id(one)][1]] = None


def _compare_passes(few: _CallRecorder, many: _CallRecorder) -> tuple[_Pass, tuple[Feature, ...]] | None:
    """A pass and its features, of two that differ in their number of samples; None: in more than that."""
    if few.names != many.names or few.kinds != many.kinds or few.handed != many.handed:
        return None
    below = {}
    for call, kind in enumerate(few.kinds):
        if kind != _BELOW:
            continue
        pairs = list(zip(few.results[call], many.results[call], strict=True))
        shapes = [_shape_per_sample(one.shape, other.shape) for one, other in pairs]
        if None in shapes:
            return None
        below[call] = tuple(
            _Result(shape, one.dtype)
            for shape, (one, _) in zip(shapes, pairs, strict=True)
            if shape is not None
        )
    features = [_feature(few.results[call][place]) for call, place in few.handed]
    if None in features:
        return None
    made = _Pass(tuple(few.names), below, tuple(few.handed))
    return made, tuple(one for one in features if one is not None)


def _shape_per_sample(few: torch.Size, many: torch.Size) -> tuple[tuple[int, bool], ...] | None:
    """A shape for any number of samples, of its shapes for two numbers."""
    found = []
    for one, other in zip(few, many, strict=True):
        times, rest = divmod(one, _SIZES[0])
        if one != other and (rest or other != times * _SIZES[1]):
            return None
        found.append((one, False) if one == other else (times, True))
    return tuple(found)


def _feature(tensor: Tensor) -> Feature | None:
    """What is handed over, if it has a row of numbers for each sample."""
    if tensor.dtype != torch.float32 or tensor.shape[:1] != (_SIZES[0],):
        return None
    axes = tuple(range(tensor.ndim - 1))
    order = axes if tensor.is_contiguous() else tuple(sorted(axes, key=lambda axis: -tensor.stride(axis + 1)))
    return Feature(tuple(tensor.shape[axis + 1] for axis in order), order)


def _flat(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _flat(value)
    elif isinstance(values, dict):
        yield from _flat(list(values.values()))


class _CallReplayer(TorchFunctionMode):
    """A forward pass that calls what one did that was watched."""

    def __init__(self, made: _Pass) -> None:
        super().__init__()
        self._pass, self._call = made, 0

    def _next(self, func: Callable[..., Any]) -> int:
        call, names = self._call, self._pass.names
        self._call += 1
        if call >= len(names) or names[call] != getattr(func, "__name__", ""):
            raise ReplayDiffers
        return call


class _FeatureRecorder(_CallReplayer):
    """Keeps the features of a pass.

    Attributes:
        found: by their place among the features.
    """

    def __init__(self, made: _Pass) -> None:
        super().__init__(made)
        self.found: dict[int, Tensor] = {}
        self._indices = {place: index for index, place in enumerate(made.places)}

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = self._next(func)
        result = func(*args, **(kwargs or {}))
        for place, one in enumerate(_flat(result)):
            if (call, place) in self._indices:
                self.found[self._indices[call, place]] = one
        return result


class _FeatureReplayer(_CallReplayer):
    """Gives the features, and zeros for what else lies below."""

    def __init__(self, made: _Pass, features: list[Tensor]) -> None:
        super().__init__(made)
        self._features = dict(zip(made.places, features, strict=True))
        self._num_samples = len(features[0])

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = self._next(func)
        results = self._pass.below.get(call)
        if results is None:
            return func(*args, **(kwargs or {}))
        given = tuple(self._given((call, place), one) for place, one in enumerate(results))
        return given[0] if len(given) == 1 else given

    def _given(self, place: tuple[int, int], result: _Result) -> Tensor:
        if place in self._features:
            return self._features[place]
        shape = [size * self._num_samples if is_open else size for size, is_open in result.shape]
        device = next(iter(self._features.values())).device
        return torch.zeros((), dtype=result.dtype, device=device).expand(shape)
