"""Observes a module's operations one by one, without torch's compiler."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that sees every operation, without importing torch's compiler, which takes a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class CountingFlops(Watching):
    """Counts floating-point operations of matrix products and convolutions with torch's formulas.

    Attributes:
        total: operations of everything that ran inside.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if not isinstance(func, OpOverload):  # control flow: count the branch that is taken
            with self:
                return func(*args, **named)
        count = _OF_RECURRENT.get(func) or flop_registry.get(func.overloadpacket)
        if count is None:
            with self:
                parts = func.decompose(*args, **named)
            return func(*args, **named) if parts is NotImplemented else parts
        out = func(*args, **named)
        self.total += count(*args, **named, out_val=out)
        return out


def _forward(x: Tensor, of_input: Tensor, of_hidden: Tensor, *_: object, **__: object) -> int:
    """Return the operations of one direction of an LSTM layer, over all steps and samples."""
    return 2 * x.shape[0] * x.shape[1] * (of_input.numel() + of_hidden.numel())


def _backward(*arguments: Any, **named: Any) -> int:
    return 2 * _forward(*arguments, **named)


# operators of oneDNN, for which torch has no formulas
_OF_RECURRENT: dict[Any, Callable[..., int]] = {
    torch.ops.aten.mkldnn_rnn_layer.default: _forward,
    torch.ops.aten.mkldnn_rnn_layer_backward.default: _backward,
}
