"""Observes a module's operations one by one, without torch's compiler."""

from typing import Any

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
        count = flop_registry.get(func.overloadpacket)
        if count is None:
            with self:
                parts = func.decompose(*args, **named)
            return func(*args, **named) if parts is NotImplemented else parts
        out = func(*args, **named)
        self.total += count(*args, **named, out_val=out)
        return out
