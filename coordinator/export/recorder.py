"""Records the torch operators that a function calls, below autograd.

This does what torch's `make_fx` does for an export, in a quarter of its time. A write into a view is recorded
as in torch's `functionalize`: the tensor that owns the memory gets a new value, and its views are taken anew.
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
Result = tuple[tuple[int, ...], torch.dtype]  # shape and type


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
    results: tuple[Result, ...]


@dataclass
class _Known:
    """What is known of a tensor.

    Attributes:
        name: the name of its value.
        result: its shape and type.
        whole: the tensor of which it is a view; None if it owns its memory.
        view: the call that takes it from `whole`.
        writes: the number of writes into its memory that this value includes.
    """

    name: str
    result: Result
    whole: "_Known | None" = None
    view: Call | None = None
    writes: int = 0

    @property
    def owner(self) -> "_Known":
        return self if self.whole is None else self.whole.owner


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
        self._known: MutableMapping[Tensor, _Known] = WeakTensorKeyDictionary()
        self._of_inputs: set[str] = set()
        for name, tensor in inputs.items():
            self._known[tensor] = _Known(name, _result(tensor))
            self._of_inputs.add(name)

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of a tensor's value; a tensor that was made outside becomes a constant."""
        known = self._known.get(tensor)
        if known is None:
            known = self._known[tensor] = _Known(f"%constant{len(self.constants)}", _result(tensor))
            with _disable_current_modes():  # stand-ins for tensors have no values
                self.constants[known.name] = tensor.detach().clone()
        return self._current(known)

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
        if self._depends((given, named)) and _is_data_dependent(func, args):
            raise DataDependentError(f"data-dependent operator {func}")
        found = func(*args, **kwargs)
        if func is torch.ops.aten.as_strided.default and type(found) is Tensor:
            raise RuntimeError("autograd views the memory of a tensor; with stand-ins it repeats the slice")
        if func is torch.ops.aten.lift_fresh.default:  # a tensor made from numbers of Python
            func = torch.ops.aten.lift_fresh_copy.default
        several = isinstance(found, (tuple, list))
        parts = found if several else [found]
        results = tuple(_result(one) for one in parts if isinstance(one, Tensor))
        call = self._note(str(func), given, named, results)
        written = _written(func, args, kwargs)
        if written and len(written) != len(results):
            raise RuntimeError(f"{func} writes into its arguments, which a graph cannot")
        whole = self._known[args[0]] if _is_view(func) else None
        if several and whole is not None:
            whole = _Known(call.name, whole.result, whole, call, whole.owner.writes)
        targets = iter(written or [one for one in parts if isinstance(one, Tensor)])
        for index, one in enumerate(parts):
            if not isinstance(one, Tensor):
                continue
            made = call
            if several:
                made = self._note("getitem", (Ref(call.name), index), {}, (_result(one),))
            if written:
                self._write(self._known[next(targets)], made.name)
            else:
                writes = 0 if whole is None else whole.owner.writes
                self._known[one] = _Known(made.name, _result(one), whole, made, writes)
        return found

    def _note(self, target: str, args: Any, kwargs: dict[str, Any], results: tuple[Result, ...]) -> Call:
        call = Call(f"%{len(self.calls)}", target, args, kwargs, results)
        self.calls.append(call)
        if self._depends((args, kwargs)):
            self._of_inputs.add(call.name)
        return call

    def _depends(self, arguments: Any) -> bool:
        return not self._of_inputs.isdisjoint(ref.name for ref in refs(arguments))

    def _current(self, known: _Known) -> str:
        """Return the name of a tensor's value; a view is taken anew if its memory was written since."""
        whole, view = known.whole, known.view
        if whole is None or view is None or known.writes == known.owner.writes:
            return known.name
        args = (Ref(self._current(whole)), *view.args[1:])
        known.name = self._note(view.target, args, view.kwargs, view.results).name
        known.writes = known.owner.writes
        return known.name

    def _write(self, known: _Known, name: str) -> None:
        """Give a tensor a new value; a view passes it on to the tensor of which it is a view."""
        known.name = name
        whole, view = known.whole, known.view
        if whole is None or view is None:
            known.writes += 1
            return
        if view.target == "getitem" and whole.view is not None and whole.whole is not None:
            view, whole = whole.view, whole.whole  # one of several parts
        space, operator, _ = view.target.split(".", 2)
        args = (Ref(self._current(whole)), Ref(name), *view.args[1:])
        target = f"{space}.{operator.removesuffix('_')}_scatter.default"
        self._write(whole, self._note(target, args, view.kwargs, (whole.result,)).name)
        known.writes = known.owner.writes

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


def _result(tensor: Tensor) -> Result:
    return tuple(tensor.shape), tensor.dtype


def _is_view(func: OpOverload) -> bool:
    """True if the operator returns views of its first argument, or makes this argument a view of itself."""
    if torch.Tag.inplace_view in func.tags:
        return True
    shared = [one.alias_info for one in func._schema.returns]  # noqa: SLF001
    return bool(shared) and shared[0] is not None and not shared[0].is_write


def _written(func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments into which an operator writes."""
    if torch.Tag.inplace_view in func.tags:
        return []
    found = []
    for index, one in enumerate(func._schema.arguments):  # noqa: SLF001
        if one.alias_info is not None and one.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(one.name))
    return [one for one in found if one is not None]


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
