"""Lets a torch module with several inputs, or with an object as output, take one array and return logits."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations, product
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fleetune.protocols.bounds import MOST_IDS
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.interface import InputType, Interface
from fleetune.protocols.model.token_ids import is_looked_up, vocabulary_of
from fleetune.protocols.user_code import as_line

LOGITS = "logits"
_OTHER_TYPES: tuple[InputType, ...] = ("int64", "bool")
_NAMED = 8  # entries of an output in a message


def attach(name: str, module: nn.Module, interface: Interface) -> None:
    """Make `module(rows)` split rows into the inputs, and return the logits of what the module returns.

    The module keeps its parameters and their names; hooks do the work.

    Args:
        name: the model's name, for messages.
        module: the module, which is changed.
        interface: its inputs with their types, and its output.
    """
    if interface.inputs:
        module.register_forward_pre_hook(
            _Split(interface, _passing(name, module, interface)), with_kwargs=True
        )
    module.register_forward_hook(_Pick(name, interface.output))


def with_types(
    name: str, module: nn.Module, interface: Interface, given: Mapping[str, InputType] = MappingProxyType({})
) -> Interface:
    """Return the interface with the type of each input, and its vocabulary if it is looked up.

    An input is float32 if the module runs so; the fewest inputs are not. Else it is int64 if look-ups depend
    on it, else bool if the module runs so, else int64.

    Args:
        name: the model's name, for messages.
        module: the module.
        interface: its inputs.
        given: types by name that are not to be found.

    Raises:
        ModelError: the module runs with none of these types.
    """
    passing, failures = _passing(name, module, interface), list[Exception]()
    for typed in _typings(interface, given):
        try:
            with _splitting(module, typed, passing):
                _run(module, _blank(typed))
        except Exception as problem:  # noqa: BLE001 - a user's module may raise anything
            failures.append(problem)
            continue
        return _with_vocabularies(module, _with_masks(module, typed, passing, given), passing)
    raise ModelError(
        f"model {name!r} cannot take inputs {interface}, as float32, bool or int64: {as_line(failures[0])}"
    )


@contextmanager
def _splitting(module: nn.Module, interface: Interface, passing: str) -> Iterator[None]:
    handle = module.register_forward_pre_hook(_Split(interface, passing), with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _typings(interface: Interface, given: Mapping[str, InputType]) -> Iterator[Interface]:
    places = [place for place, one in enumerate(interface.inputs) if one.name not in given]
    for count in range(len(places) + 1):
        for changed in combinations(places, count):
            for types in product(_OTHER_TYPES, repeat=count):
                found = dict(zip(changed, types, strict=True))
                inputs = (
                    replace(one, type=given.get(one.name, found.get(place, "float32")))
                    for place, one in enumerate(interface.inputs)
                )
                yield replace(interface, inputs=tuple(inputs))


def _with_masks(
    module: nn.Module, interface: Interface, passing: str, given: Mapping[str, InputType]
) -> Interface:
    """Return the interface with bool for int64 inputs on which no look-up depends, if the module runs so."""
    for index, (one, place) in enumerate(interface.places):
        if one.type != "int64" or one.name in given:
            continue
        with _splitting(module, interface, passing):
            if is_looked_up(module, _blank(interface), _changed(interface, place)):
                continue
        inputs = list(interface.inputs)
        inputs[index] = replace(one, type="bool")
        masked = replace(interface, inputs=tuple(inputs))
        try:
            with _splitting(module, masked, passing):
                _run(module, _blank(masked))
        except Exception:  # noqa: BLE001, S112 - a user's module may raise anything
            continue
        interface = masked
    return interface


def _with_vocabularies(module: nn.Module, interface: Interface, passing: str) -> Interface:
    inputs = []
    with _splitting(module, interface, passing):
        for one, place in interface.places:
            changed = _changed(interface, place)
            rows = vocabulary_of(module, _blank(interface), changed) if one.type == "int64" else None
            inputs.append(replace(one, vocabulary=None if rows is None else min(rows, MOST_IDS)))
    return replace(interface, inputs=tuple(inputs))


def _changed(interface: Interface, place: slice) -> Tensor:
    rows = _blank(interface)
    rows[:, place] += 1
    return rows


def _blank(interface: Interface) -> Tensor:
    return torch.zeros(2, interface.size)


def _run(module: nn.Module, rows: Tensor) -> None:
    training = module.training
    module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module(rows)
    finally:
        module.train(training)


def _passing(name: str, module: nn.Module, interface: Interface) -> str:
    """Return how the module takes its inputs: "names" (as keywords) or "dict" (as one argument).

    Raises:
        ModelError: its forward method takes neither these names nor a single argument.
    """
    signature = inspect.signature(module.forward)
    parameters = [
        one
        for one in signature.parameters.values()
        if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    known, wanted = {one.name for one in parameters}, [one.name for one in interface.inputs]
    required = [one.name for one in parameters if one.default is one.empty]
    anything = any(one.kind == one.VAR_KEYWORD for one in signature.parameters.values())
    if (anything or set(wanted) <= known) and set(required) <= set(wanted):
        return "names"
    if len(required) == 1 and not set(wanted) & known:
        return "dict"
    raise ModelError(
        f"model {name!r}: model.inputs names {', '.join(wanted)}, and forward takes"
        f" {', '.join(one.name for one in parameters) or 'nothing'}; use the same names, or one argument that"
        " receives them as a dict"
    )


@dataclass(frozen=True)
class _Split:
    """A forward pre-hook that replaces rows, shape (n, size), by the module's inputs."""

    interface: Interface
    passing: str

    def __call__(self, _: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> Any:
        (rows,) = args
        if not rows.is_floating_point():
            raise TypeError("rows of several inputs are float32")  # else they would pass as token ids
        found = {one.name: self._input(rows[:, place], one) for one, place in self.interface.places}
        return ((), found) if self.passing == "names" else ((found,), {})

    @staticmethod
    def _input(values: Tensor, one: Any) -> Tensor:
        shaped = values.reshape(-1, *one.shape)
        return shaped if one.type == "float32" else shaped.to(getattr(torch, one.type))


@dataclass(frozen=True)
class _Pick:
    """A forward hook that replaces a module's output by the logits in it."""

    name: str
    output: str

    def __call__(self, _: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, Tensor) and not self.output:
            return None
        entries = _entries(output)
        wanted = self.output or LOGITS
        if wanted in entries:
            return entries[wanted]
        named = ", ".join([*entries][:_NAMED]) or "no tensors"
        raise ModelError(
            f"model {self.name!r} returns {type(output).__name__} with {named}, without {wanted!r};"
            " set model.output to the entry that has the logits"
        )


def _entries(output: Any) -> dict[str, Tensor]:
    """Return the tensors of an output by name; those of a tuple are called 0, 1, ..."""
    if isinstance(output, Mapping):
        found = dict(output)
    elif hasattr(output, "_asdict"):
        found = output._asdict()
    elif isinstance(output, (tuple, list)):
        found = {str(place): one for place, one in enumerate(output)}
    else:
        found = dict(vars(output)) if hasattr(output, "__dict__") else {}
    return {str(key): value for key, value in found.items() if isinstance(value, Tensor)}
