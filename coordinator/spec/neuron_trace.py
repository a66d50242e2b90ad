"""Follows the neurons of a network through each torch operation of one forward pass.

A layer numbers its outputs as new neurons. Operations that move values move the numbers in the same way.
Neurons whose values are added, or that share a weight, become one neuron. An operation without a rule here
makes all neurons that enter it always active. So the description may be too coarse, but it is never wrong.
(torch-pruning treats unknown operations as elementwise. So it couples the wrong channels after permute or
flip, and removes neurons that a shortcut still needs.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fleetune.coordinator.spec.neurons import FIXED, FREE, Neurons, compact, flat
from fleetune.coordinator.spec.product_rules import RULES as PRODUCTS
from fleetune.coordinator.spec.recurrent_rules import RULES as RECURRENT


class NeuronTrace(TorchFunctionMode):
    """Numbers all activations that are computed inside `with NeuronTrace(neurons):`."""

    def __init__(self, neurons: Neurons) -> None:
        super().__init__()
        self._neurons, self._is_paused = neurons, False

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Note a module's inputs, and take the result of each spectral norm as the weight that it normalises.

        That norm depends on all entries, as the norm of a LayerNorm does.
        """
        norms = [part for part in module.modules() if type(part).__name__ == "_SpectralNorm"]
        hooks = [part.register_forward_pre_hook(self._pause) for part in norms]
        hooks += [part.register_forward_hook(self._resume) for part in norms]
        hooks.append(module.register_forward_pre_hook(self._take_inputs, with_kwargs=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _take_inputs(self, _: nn.Module, *inputs: object) -> None:
        for tensor in flat(inputs):  # blank samples are zeros, but no constants
            self._neurons.note(tensor, torch.tensor(FIXED).expand(tensor.shape))

    def _pause(self, *_: object) -> None:
        self._is_paused = True

    def _resume(self, _: nn.Module, arguments: tuple[Tensor, ...], weight: Tensor) -> None:
        self._is_paused = False
        self._neurons.make(weight, [(arguments[0], range(weight.ndim))])

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_paused:
            return func(*args, **kwargs)
        for first in kwargs.keys() & {"input", "tensors"}:  # the rules take it by position
            args = (kwargs.pop(first), *args)
        result = func(*args, **kwargs)
        name = _name(func)
        if name in _RULES:
            self._neurons.note(result, _RULES[name](self._neurons, result, *args, **kwargs))
        elif name in _MOVES:
            self._neurons.note(result, func(_MOVES[name](self._neurons, args[0]), *args[1:], **kwargs))
        elif name == "weight_norm":
            _weight_norm(self._neurons, result, *args, **kwargs)
        elif any(True for _ in flat(result)) or (result is None and name not in _PROPERTIES):
            _unknown(self._neurons, result, (args, kwargs))
        _constant_choices(self._neurons, result)
        return result


def _name(func: Callable[..., Any]) -> str:
    """Return the name of a function or of a property of tensors, without the underscores around it."""
    name: str = getattr(func, "__name__", "")
    return func.__self__.__name__ if name == "__get__" else name.strip("_")  # type: ignore[attr-defined]


def _unknown(neurons: Neurons, result: object, arguments: object) -> None:
    """Make all neurons that enter an operation always active. What it computes from constants is constant."""
    if not neurons.is_free(arguments):
        neurons.fix(arguments)
        return
    # into which the operation may have written
    neurons.free([result, [one for one in flat(arguments) if not neurons.is_parameter(one)]])


def _constant_choices(neurons: Neurons, result: object) -> None:
    """Note the answers to questions about inputs as constants: whether a token is padding."""
    for tensor in flat(result):
        if tensor.dtype == torch.bool:
            numbers = neurons.of(tensor)
            neurons.note(tensor, numbers.where(numbers != FIXED, FREE))


def _numbers(neurons: Neurons, values: Any) -> Any:
    """Numbers in the place of a tensor or of a sequence of tensors."""
    return neurons.of(values) if isinstance(values, Tensor) else [neurons.of(value) for value in values]


# Each rule takes an operation's result and its arguments as in torch, and returns the numbers of the result.


def _linear(
    neurons: Neurons, result: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    neurons.use(weight, result.numel() // len(weight))
    neurons.own(weight, 1, neurons.along(x, -1))
    return neurons.layer(result, -1, neurons.new(len(weight)), weight, bias)


def _conv(
    neurons: Neurons,
    result: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: object = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
) -> Tensor:
    neurons.use(weight, result.numel() // len(weight))
    axis = 1 - weight.ndim
    inputs = neurons.along(x, axis)
    if groups == len(inputs) > 1:  # depthwise: each channel stays itself
        return neurons.layer(result, axis, inputs.repeat_interleave(len(weight) // groups), weight, bias)
    if groups == 1:
        neurons.own(weight, 1, inputs)
    else:  # a column belongs to another input in each group
        neurons.fix(x)
    return neurons.layer(result, axis, neurons.new(len(weight)), weight, bias)


def _embedding(
    neurons: Neurons, result: Tensor, _: Tensor, weight: Tensor, *__: object, **___: object
) -> Tensor:
    neurons.own(weight, 0, torch.full((len(weight),), FIXED))
    numbers = neurons.new(weight.shape[1])
    neurons.own(weight, 1, numbers)
    return neurons.layer(result, -1, numbers)


def _batch_norm(
    neurons: Neurons,
    result: Tensor,
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: object,
    **__: object,
) -> Tensor:
    return neurons.layer(result, 1, neurons.along(x, 1), running_mean, running_var, weight, bias)


def _group_norm(
    neurons: Neurons,
    result: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *_: object,
    **__: object,
) -> Tensor:
    return neurons.layer(result, 1, neurons.along(x, 1), weight, bias)


def _layer_norm(
    neurons: Neurons,
    result: Tensor,
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Any = None,  # in the place of a root-mean-square norm's eps
    *_: object,
    **__: object,
) -> Tensor:
    if len(normalized_shape) > 1:  # which of the axes are channels is not known
        return _unchanged(neurons, result, x)
    return neurons.layer(result, -1, neurons.along(x, -1), *flat((weight, bias)))


def _prelu(neurons: Neurons, result: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    if len(weight) == 1:
        return _unchanged(neurons, result, x)
    return neurons.layer(result, 1, neurons.along(x, 1), weight)


def _pool(neurons: Neurons, result: Tensor, x: Tensor, *_: object, channels: int, **__: object) -> Tensor:
    return neurons.layer(result, channels, neurons.along(x, channels))


def _reduce(
    neurons: Neurons, result: Any, x: Tensor, dim: Any = None, *args: object, **kwargs: Any
) -> Tensor | list[Tensor]:
    """Numbers of a sum, mean or maximum: neurons along `dim` become one, unless these are all of a layer."""
    if any(True for _ in flat((dim, kwargs))):  # maximum by another name
        return _together(neurons, result, x, dim, *args, **kwargs)
    dim = kwargs.get("axis", dim)
    dims = range(x.ndim) if dim is None or isinstance(dim, bool) else [dim] if isinstance(dim, int) else dim
    gone = sorted(axis % x.ndim for axis in dims)
    remaining_axes = [axis for axis in range(x.ndim) if axis not in gone]
    rows = neurons.of(x).permute(*remaining_axes, *gone).flatten(len(remaining_axes))
    if neurons.would_be_one(rows):  # as in a norm that the model computes itself
        return [torch.tensor(FREE).expand(tensor.shape) for tensor in flat(result)]
    first = neurons.merged(rows, -1)
    return [first.reshape(tensor.shape) for tensor in flat(result)]


def _unchanged(neurons: Neurons, result: Tensor, x: Tensor, *_: object, **__: object) -> Tensor:
    """Numbers of a result whose values keep their neurons and their order."""
    return neurons.of(x).reshape(result.shape)


def _together(neurons: Neurons, result: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Numbers of an elementwise combination: neurons that are combined become one."""
    first, *others = (neurons.of(tensor).expand(result.shape) for tensor in flat((args, kwargs)))
    for other in others:
        neurons.join(first, other)
        small, its_other = compact(first, other)
        first = torch.where(small == FREE, its_other, small).expand(result.shape)
    return first


def _softmax(
    neurons: Neurons, result: Tensor, x: Tensor, dim: int | None = None, *_: object, **kwargs: Any
) -> Tensor:
    """Numbers of a softmax: attention over positions keeps its heads; a softmax over neurons fixes them."""
    dim = kwargs.get("axis", dim)
    if dim is not None and neurons.are_equal_along(x, dim):
        return neurons.of(x)
    neurons.fix(x)
    return neurons.of(result)


def _constant(_: Neurons, result: Tensor, *__: object, **___: object) -> Tensor:
    """Numbers of a new tensor that has only the shape of another one."""
    return torch.tensor(FREE).expand(result.shape)


def _weight_norm(neurons: Neurons, weight: Tensor, v: Tensor, g: Tensor, dim: int = 0) -> None:
    """Store that a weight has all its axes from its direction v, and the axis of its lengths from g."""
    neurons.make(weight, [(v, range(v.ndim)), (g, [dim % v.ndim] if g.numel() > 1 else [])])


def _padded(
    neurons: Neurons, result: Tensor, x: Tensor, pad: Any, mode: str = "constant", value: object = None
) -> Tensor:
    numbers = neurons.of(x).double()  # because torch does not reflect integers
    return torch.nn.functional.pad(numbers, pad, mode, FREE if mode == "constant" else None).long()


def _table(rule: Callable[..., Any], names: str) -> dict[str, Callable[..., Any]]:
    return dict.fromkeys(names.split(), rule)


# By the function's name in torch, without the underscores around it.
_RULES: dict[str, Callable[..., Any]] = {
    **PRODUCTS,
    **RECURRENT,
    "linear": _linear,
    "softmax": _softmax,
    "embedding": _embedding,
    "group_norm": _group_norm,
    "prelu": _prelu,
    "pad": _padded,
    "interpolate": partial(_pool, channels=1),
    **_table(_conv, "conv1d conv2d conv3d"),
    **_table(_batch_norm, "batch_norm instance_norm"),
    **_table(_layer_norm, "layer_norm rms_norm"),
    **_table(
        _constant,
        "zeros_like ones_like full_like empty_like rand_like randn_like "
        "new_zeros new_ones new_full new_empty new_tensor",
    ),
    **_table(_reduce, "mean std var var_mean sum amax amin max min"),
    **{
        f"{kind}_pool{dims}d": partial(_pool, channels=-dims - 1)
        for kind in ("max", "avg", "lp", "adaptive_max", "adaptive_avg")
        for dims in (1, 2, 3)
    },
    **_table(
        _unchanged,
        "relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid "
        "sigmoid logsigmoid tanh tanhshrink exp log sqrt rsqrt abs neg square dropout dropout1d dropout2d "
        "dropout3d alpha_dropout feature_alpha_dropout clone detach contiguous to type_as float data "
        "requires_grad normalize view reshape flatten unflatten squeeze unsqueeze ravel invert logical_not",
    ),
    **_table(
        _together,
        "add iadd radd sub isub rsub subtract mul imul rmul multiply div idiv rdiv truediv itruediv rtruediv "
        "divide pow clamp maximum minimum where masked_fill gt ge lt le eq ne and or xor logical_and "
        "logical_or logical_xor",
    ),
}
_PROPERTIES = frozenset({"grad", "grad_fn"})  # that may be None
# Operations that move values do the same to numbers that stand in the place of their first argument.
_MOVES = _table(
    _numbers,
    "permute transpose movedim moveaxis swapaxes swapdims t T mT H mH adjoint cat concat concatenate stack "
    "chunk split tensor_split unbind getitem narrow select index_select expand repeat tile repeat_interleave "
    "flip roll pixel_shuffle pixel_unshuffle",
)
