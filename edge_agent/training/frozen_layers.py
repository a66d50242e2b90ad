"""Runs a torch module's forward pass from cached features, without its frozen layers.

Forward passes are recorded call by call: torch's functions and their tensors. A call is *above* if one of
its inputs trains, or if it draws random numbers; otherwise it is *below*. A tensor that a call below passes
to a call above is a feature. A replay runs the module's own code again, but calls below compute nothing: they
return the features, or zeros of the right shape that take no memory. A module whose calls differ from pass to
pass cannot be replayed.
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
)  # dropout counts as above in evaluation too, so that both modes have the same boundary


@dataclass(frozen=True)
class _Result:
    """A tensor that a call returned. In its shape, (times, True) means times the number of samples."""

    shape: tuple[tuple[int, bool], ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Pass:
    """A forward pass in one mode.

    Attributes:
        names: names of the called functions.
        below: tensors that calls below return, by the call's number.
        places: for each feature, the call that returns it and its position among the results.
    """

    names: tuple[str, ...]
    below: dict[int, tuple[_Result, ...]]
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Feature:
    """A tensor at the boundary between frozen and trained layers.

    Attributes:
        shape: shape of one sample's feature, in the order of its numbers.
        order: order of torch's axes, without that of the samples, in `shape`.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Replay:
    """A recording with which a module can run from its features.

    Attributes:
        passes: the recorded pass in training (True) and in evaluation (False).
        features: tensors at the boundary, in order.
        input_shape: shape of one sample.
        dtype: type of the samples.
        device: where the module computes.
    """

    passes: dict[bool, _Pass]
    features: tuple[Feature, ...]
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Number of features of a sample."""
        return sum(one.size for one in self.features)

    def compute_features(self, module: nn.Module, x: Tensor) -> NDArray[np.float32]:
        """Return the features of samples, shape (n, size). Raises ReplayDiffers."""
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
        """Return the module's output in its present mode for samples with these features, shape (n, size).

        Raises:
            ReplayDiffers: the module called other functions than in the recorded pass.
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
    """A forward pass calls other functions than the recorded pass."""


def record_boundary(module: nn.Module, x: Callable[[int], Tensor]) -> Replay | None:
    """Record forward passes in both modes; return how to replay them, or None if that is impossible.

    The module ends in evaluation mode with unchanged statistics.

    Args:
        module: its trained parameters require a gradient, and no others do.
        x: returns a given number of samples, the same ones each time.

    Returns:
        The recording; None if samples themselves are inputs of trained layers, or the passes differ.
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
    """True if a replay has the module's output in both modes."""
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
    """Records one forward pass, call by call.

    Attributes:
        names: names of the called functions.
        results: tensors that each call returned.
        kinds: for each call, whether it is below and returns a tensor.
        handed: (call, position) of each tensor that goes from below to above.
        fed_with_samples: True if a sample itself is an input of a call above.
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
    """Return a pass and its features, from two recordings with different numbers of samples.

    Returns:
        The pass and its features; None if the recordings differ in more than the number of samples.
    """
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
    """Return the shape for any number of samples, from shapes for two numbers.

    The result is None if it cannot be derived.
    """
    found = []
    for one, other in zip(few, many, strict=True):
        times, rest = divmod(one, _SIZES[0])
        if one != other and (rest or other != times * _SIZES[1]):
            return None
        found.append((one, False) if one == other else (times, True))
    return tuple(found)


def _feature(tensor: Tensor) -> Feature | None:
    """Return a tensor as a feature; None if the tensor does not have one row for each sample."""
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
    """Runs a forward pass and checks that the module makes the recorded calls."""

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
    """Stores the features of a pass.

    Attributes:
        found: tensors by the number of the feature.
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
    """Returns the features, and zeros for all other results of calls below."""

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
