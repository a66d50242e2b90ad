"""Records the torch operators that a function calls, below autograd.

This does what torch's `make_fx` does for an export, in a quarter of its time.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes, autograd_would_have_decomposed
from torch.utils.weak import WeakTensorKeyDictionary

from fleetune.protocols.model.torch_dispatch import Watching

Decompositions = Mapping[Any, Callable[..., Any]]


class DataDependentError(RuntimeError):
    """Values of the data would decide what is computed."""


@dataclass(frozen=True)
class Ref:
    """A reference, by name, to an input, a constant, or the result of an operation."""

    name: str


@dataclass(frozen=True)
class Call:
    """One call of a torch operator, with the sizes of one batch.

    Attributes:
        name: the name of its result.
        target: the operator, such as "aten.add.Tensor"; "getitem" takes one result of several.
        args, kwargs: the arguments, with `Ref` in place of tensors.
        results: the shape and type of each result.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]


class Recorder(Watching):  # type: ignore[no-untyped-call]
    """Context that records the operators called inside.

    Args:
        inputs: tensors by name. What depends on their values may not decide what is computed.
        decompositions: replaced operators; the operators that the replacement calls are recorded instead.

    Attributes:
        calls: the recorded calls in their order.
        constants: tensors from outside, by name.
    """

    def __init__(self, inputs: Mapping[str, Tensor], decompositions: Decompositions) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.constants: dict[str, Tensor] = {}
        self._decompositions = decompositions
        self._names: MutableMapping[Tensor, str] = WeakTensorKeyDictionary()
        self._of_inputs: set[str] = set()
        for name, tensor in inputs.items():
            self._names[tensor] = name
            self._of_inputs.add(name)

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a tensor; one that was made outside becomes a constant."""
        name = self._names.get(tensor)
        if name is None:
            name = self._names[tensor] = f"%constant{len(self.constants)}"
            with _disable_current_modes():  # stand-ins for tensors have no values
                self.constants[name] = tensor.detach().clone()
        return name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a stand-in's device
            return func(*args, **kwargs)
        rule = self._decompositions.get(func)
        if rule is None and func not in _SIZES and func._can_decompose():  # noqa: SLF001
            given = [
                part
                for one in (*args, *kwargs.values())
                for part in (one if isinstance(one, list) else [one])
            ]
            rule = func.decompose if autograd_would_have_decomposed(func, given) else None
        if rule is not None:
            with self:
                found = rule(*args, **kwargs)
            if found is not NotImplemented:
                return found
        return self._recorded(func, args, kwargs)

    def _recorded(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> Any:
        given, named = self._named(args), self._named(kwargs)
        depends = not self._of_inputs.isdisjoint(ref.name for ref in refs((given, named)))
        if depends and _is_data_dependent(func, args):
            raise DataDependentError(f"data-dependent operator {func}")
        found = func(*args, **kwargs)
        if func is torch.ops.aten.as_strided.default and type(found) is Tensor:
            raise RuntimeError("autograd views the memory of a tensor; with stand-ins it repeats the slice")
        if func is torch.ops.aten.lift_fresh.default:  # a tensor made from numbers of Python
            func = torch.ops.aten.lift_fresh_copy.default
        self._note(str(func), given, named, found, depends)
        return found

    def _note(self, target: str, args: Any, kwargs: dict[str, Any], found: Any, depends: bool) -> None:
        """Store a call, and one that takes each of its results if there are several."""
        name = f"%{len(self.calls)}"
        several = isinstance(found, (tuple, list))
        tensors = [one for one in (found if several else [found]) if isinstance(one, Tensor)]
        results = tuple((tuple(one.shape), one.dtype) for one in tensors)
        self.calls.append(Call(name, target, args, kwargs, results))
        if depends:
            self._of_inputs.add(name)
        if not several:
            for one in tensors:
                self._names[one] = name
            return
        for index, one in enumerate(found):
            if isinstance(one, Tensor):
                self._note("getitem", (Ref(name), index), {}, one, depends)

    def _named(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return Ref(self.name_of(value))
        if isinstance(value, (tuple, list)):
            return tuple(self._named(part) for part in value)
        if isinstance(value, dict):
            return {key: self._named(part) for key, part in value.items()}
        return value


_SIZES = {
    torch.ops.aten.size.default,
    torch.ops.aten.stride.default,
    torch.ops.aten.storage_offset.default,
}


def _is_data_dependent(func: OpOverload, args: Any) -> bool:
    """True if the values of its arguments decide what the operator returns to Python, or a result's shape."""
    if func is torch.ops.aten.index.Tensor:
        return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
    return not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(func.tags)


def refs(value: Any) -> Iterator[Ref]:
    """Yield the references in nested arguments."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, (dict, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from refs(part)


@contextmanager
def without_values(inputs: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield stand-ins of the inputs without values, for which torch computes only shapes inside."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes long to import

    fake = FakeTensorMode(allow_fallback_kernels=True, allow_non_fake_inputs=True)
    with fake:
        yield {name: fake.from_tensor(tensor, static_shapes=True) for name, tensor in inputs.items()}
