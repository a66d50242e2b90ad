"""Random numbers for a module's forward pass from outside, so that every backend draws the same ones."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.backends import cudnn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fleetune.protocols.model.noise import Kind, Noise
from fleetune.protocols.model.torch_dispatch import Watching

Numbers = Callable[[int, Noise], Tensor]
_Take = Callable[[Kind, float, Any], Tensor]


class GivenDraws(TorchFunctionMode):
    """Inside `with GivenDraws(numbers):`, a forward pass takes its random numbers from `numbers`.

    Draw k of a forward pass (from 0) takes numbers(k, noise), a tensor with as many entries as `noise` has.
    The shape of `noise` is the shape of this draw. Covered are dropout of every kind, also inside attention
    and recurrent layers, and the operators that draw Bernoulli, uniform and normal numbers. Dropout with
    p = 0 or in evaluation draws nothing. Other random operators, and those with a generator of their own, use
    torch's numbers.

    Args:
        numbers: returns the numbers of a draw.
        operators: False if only `nn.Dropout` and its functions draw, as `operators_draw` of an earlier pass
            showed. Watching every operator makes a small network's step 1.4 times as long.
        in_place: False if dropout in place writes into a new tensor, for traces: they cannot follow the
            gradient through a write into a view.

    Attributes:
        operators_draw: True if something else than `nn.Dropout` and its functions drew.
        reads_values: True if the module read the value of a tensor, on which its next operators may depend.
    """

    def __init__(self, numbers: Numbers, *, operators: bool = True, in_place: bool = True) -> None:
        super().__init__()
        self._numbers, self._in_place = numbers, in_place
        self._count = 0
        self.operators_draw = self.reads_values = False
        self._operators: AbstractContextManager[object] = _Operators(self) if operators else nullcontext()

    def __enter__(self) -> Self:
        self._operators.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *problem: object) -> None:
        super().__exit__(*problem)  # type: ignore[no-untyped-call]
        self._operators.__exit__(*problem)  # type: ignore[arg-type]

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._dropout(func, args, kwargs)
        context = _CONTEXTS.get(func)
        if context is None:
            return func(*args, **kwargs)
        with context(args, kwargs):
            return func(*args, **kwargs)

    def _dropout(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Multiply by factors that hold 1 / (1 - p), in one operator and with one rounding."""
        call = inspect.signature(func).bind(*args, **kwargs)
        call.apply_defaults()
        x, p, training, inplace = (call.arguments[name] for name in ("input", "p", "training", "inplace"))
        axes = _DROPOUTS[func]
        if not training or p == 0 or (axes and x.ndim not in axes):
            return func(*args, **kwargs)
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if axes else x.shape
        factors = self.take("dropout", p, shape).to(x.device)
        return x.mul_(factors) if inplace and self._in_place else torch.mul(x, factors)

    def take(self, kind: Kind, p: float, shape: Any) -> Tensor:
        """Return the numbers of the next draw."""
        sizes = tuple(map(int, shape))
        noise = Noise(sizes, float(p), kind)
        index, self._count = self._count, self._count + 1
        return self._numbers(index, noise).reshape(sizes)


class _Operators(Watching):  # type: ignore[no-untyped-call]
    """Replaces random operators below torch's functions, such as those of composite functions in C++."""

    def __init__(self, given: GivenDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = given

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:  # noqa: SLF001 - the operator's name
            self._given.reads_values = True
        rule = _RULES.get(func)
        if rule is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        kwargs.pop("generator", None)
        self._given.operators_draw = True
        return rule(self._given.take, *args, **kwargs)


def _plain_attention(query: Tensor, p: float) -> AbstractContextManager[object]:
    """Return a context in which attention with dropout uses separate operators.

    A GPU's fused kernels draw inside. The processor uses separate operators anyway.
    """
    return nullcontext() if p == 0 or query.device.type == "cpu" else sdpa_kernel(SDPBackend.MATH)


def _plain_recurrent(args: Any, _: Any) -> AbstractContextManager[object]:
    """Return a context in which recurrent layers with dropout do without cuDNN, which draws inside."""
    dropout = next((one for one in args if isinstance(one, float)), 0.0)
    return cudnn.flags(enabled=False) if dropout and args[0].is_cuda else nullcontext()


def _argument(place: int, name: str, args: Any, kwargs: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, 0.0)


_CONTEXTS: dict[Callable[..., Any], Callable[[Any, Any], AbstractContextManager[object]]] = {
    functional.scaled_dot_product_attention: lambda args, kwargs: _plain_attention(
        _argument(0, "query", args, kwargs), _argument(4, "dropout_p", args, kwargs)
    ),
    functional.multi_head_attention_forward: lambda args, kwargs: _plain_attention(
        _argument(0, "query", args, kwargs), _argument(10, "dropout_p", args, kwargs)
    ),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _plain_recurrent),
}
_DROPOUTS: dict[Callable[..., Any], range | None] = {  # numbers of axes of which whole channels are dropped
    functional.dropout: None,
    functional.dropout1d: range(3, 4),
    functional.dropout2d: range(3, 5),  # with three axes, torch means (n, channels, length)
    functional.dropout3d: range(5, 6),
}


def _native_dropout(take: _Take, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return _aten.native_dropout.default(x, p, train)  # type: ignore[no-any-return]
    mask = take("mask", p, x.shape).to(x.device)
    return x * (mask * (0.0 if p >= 1 else 1 / (1 - p))).to(x.dtype), mask.bool()


def _mask_in_place(take: _Take, x: Tensor, p: float = 0.5) -> Tensor:
    return x.copy_(take("mask", 1 - p, x.shape))


def _mask_by_tensor_in_place(take: _Take, x: Tensor, p: Tensor) -> Tensor:
    return x.copy_(take("uniform", 0, x.shape).to(p.device) < p)


def _mask_by_tensor(take: _Take, p: Tensor) -> Tensor:
    return (take("uniform", 0, p.shape).to(p.device) < p).to(p.dtype)


def _mask(take: _Take, x: Tensor, p: float) -> Tensor:
    return take("mask", 1 - p, x.shape).to(x)


def _new(
    take: _Take, shape: Any, *, kind: Kind, dtype: Any = None, device: Any = None, **_: object
) -> Tensor:
    return take(kind, 0, shape).to(device or "cpu", dtype or torch.get_default_dtype())


def _like(
    take: _Take, x: Tensor, *, kind: Kind, dtype: Any = None, device: Any = None, **_: object
) -> Tensor:
    return take(kind, 0, x.shape).to(device or x.device, dtype or x.dtype)


def _uniform_in_place(take: _Take, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    return x.copy_(_scaled(take("uniform", 0, x.shape), low, high - low))


def _normal_in_place(take: _Take, x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return x.copy_(_scaled(take("normal", 0, x.shape), mean, std))


def _normal(take: _Take, mean: Tensor | float, std: Tensor | float = 1.0) -> Tensor:
    given = [one for one in (mean, std) if isinstance(one, Tensor)]
    shape = (given[0] + given[-1]).shape
    return _scaled(take("normal", 0, shape).to(given[0]), mean, std)


def _normal_of_size(take: _Take, mean: float, std: float, size: Any, **options: Any) -> Tensor:
    return _scaled(_new(take, size, kind="normal", **options), mean, std)


def _scaled(drawn: Tensor, start: Tensor | float, width: Tensor | float) -> Tensor:
    wide = drawn if isinstance(width, (int, float)) and width == 1 else drawn * width
    return wide if isinstance(start, (int, float)) and start == 0 else wide + start


_aten = torch.ops.aten
_RULES: dict[Any, Callable[..., Any]] = {
    _aten.native_dropout.default: _native_dropout,
    _aten.bernoulli_.float: _mask_in_place,
    _aten.bernoulli_.Tensor: _mask_by_tensor_in_place,
    _aten.bernoulli.default: _mask_by_tensor,
    _aten.bernoulli.p: _mask,
    _aten.rand.default: partial(_new, kind="uniform"),
    _aten.randn.default: partial(_new, kind="normal"),
    _aten.rand_like.default: partial(_like, kind="uniform"),
    _aten.randn_like.default: partial(_like, kind="normal"),
    _aten.uniform_.default: _uniform_in_place,
    _aten.normal_.default: _normal_in_place,
    _aten.normal.float_float: _normal_of_size,
    _aten.normal.float_Tensor: _normal,
    _aten.normal.Tensor_float: _normal,
    _aten.normal.Tensor_Tensor: _normal,
}
