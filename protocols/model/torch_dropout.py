"""Dropout with given factors, so that every backend drops the same entries."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

Factors = Callable[[int, tuple[int, ...], float, int], Tensor]


class Dropouts(TorchFunctionMode):
    """Inside `with Dropouts(factors):`, dropout uses given factors.

    In training, dropout number k of a forward pass (from 0) multiplies its input of n samples by factors(k,
    shape of one sample's factors, p, n), which broadcast. The feature forms (`dropout1d` to `dropout3d`) drop
    whole channels. Dropout with p = 0 or in evaluation is not counted. Alpha dropout, dropout inside a
    composite function (multi-head attention), and input without a batch axis use torch's own random numbers.
    """

    def __init__(self, factors: Factors) -> None:
        super().__init__()
        self._factors = factors
        self._count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _BATCHED_DIMENSIONS:
            return func(*args, **kwargs)
        call = inspect.signature(func).bind(*args, **kwargs)
        call.apply_defaults()
        x, p, training, inplace = (call.arguments[name] for name in ("input", "p", "training", "inplace"))
        if not training or p == 0 or x.ndim not in _BATCHED_DIMENSIONS[func]:
            return func(*args, **kwargs)
        num_samples, *sizes = x.shape
        if func is not functional.dropout:
            sizes[1:] = [1] * len(sizes[1:])
        factors = self._factors(self._count, tuple(sizes), p, num_samples)
        self._count += 1
        return x.mul_(factors) if inplace else torch.mul(x, factors)


_BATCHED_DIMENSIONS: dict[Callable[..., Any], range] = {
    functional.dropout: range(1, 10),
    functional.dropout1d: range(3, 4),
    functional.dropout2d: range(3, 5),  # with three axes, torch means (n, channels, length)
    functional.dropout3d: range(5, 6),
}
