"""Checked calls of a method's steps: a mistake in a user's method becomes one line that names the step.

Coordinator, agent and simulator call `init_coordinator`, `admit`, `plan`, `aggregate`, `init_device`, `work`
and `choices` through this module. The arrays of a state are read-only, so NumPy stops a step that writes into
them. Another device or the next attempt may start from the same arrays.
"""

import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np

from fleetune.protocols.errors import FleetuneError, MethodError
from fleetune.protocols.method.choice import Budget, Choice, DeviceReport
from fleetune.protocols.method.method import DeviceId, Method, Round
from fleetune.protocols.method.trainer import Trainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.arrays import can_travel
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.user_code import as_line, is_library

_PLAIN = (bool, int, float, str, bytes, bytearray, Enum, set, frozenset, type(None), msgspec.UnsetType)
_READ_ONLY = "a state's arrays are read-only: make new ones and return them in a new state"

T = TypeVar("T")
AnyMethod = Method[Any, Any, Any, Any]


def init_coordinator(method: AnyMethod, weights: FlatArray) -> Any:
    """Return the coordinator's state before round 1. Raises MethodError."""
    weights.flags.writeable = False
    state = _run_step(method, "init_coordinator", lambda: method.init_coordinator(weights))
    return _checked(method, "init_coordinator", state, method.state_type, "state")


def admit(method: AnyMethod, state: Any, report: DeviceReport) -> Any:
    """Return the coordinator's state after it has admitted a device. Raises MethodError."""
    admitted = _run_step(method, "admit", lambda: method.admit(state, report))
    if admitted is state:
        return state
    _check_type(method, "admit", admitted, method.state_type, "state")  # only arrays need checks
    return admitted


def plan(method: AnyMethod, state: Any, round_: Round, key: Key) -> tuple[Any, Mapping[DeviceId, Any]]:
    """Return the coordinator's next state and the tasks. Raises MethodError."""
    given = _run_step(method, "plan", lambda: method.plan(state, round_, key))
    planned, tasks = _pair(method, "plan", given, "the next state and the tasks by device")
    if not isinstance(tasks, Mapping):
        raise MethodError(
            f"{title(method, 'plan')} returns {_kind(tasks)} as tasks; expected a mapping of devices to tasks"
        )
    if planned is not state:
        _checked(method, "plan", planned, method.state_type, "state")
    return planned, _Tasks(method, tasks)


def aggregate(
    method: AnyMethod, state: Any, updates: Iterable[tuple[DeviceId, Any]], combine: Combine = MEAN
) -> Any:
    """Return the coordinator's state after a round. Raises MethodError, and errors of `updates`."""
    merged = _run_step(method, "aggregate", lambda: method.aggregate(state, updates, combine))
    return _checked(method, "aggregate", merged, method.state_type, "state")


def init_device(method: AnyMethod, weights: FlatArray) -> Any:
    """Return a device's state before its first task. Raises MethodError."""
    weights.flags.writeable = False
    state = _run_step(method, "init_device", lambda: method.init_device(weights))
    return _checked(method, "init_device", state, method.device_state_type, "state")


def work(
    method: AnyMethod, state: Any, task: Any, trainer: Trainer, budget: Budget, key: Key
) -> tuple[Any, Any]:
    """Return a device's next state and its update. Raises MethodError, and errors that the trainer raises on
    purpose.
    """
    frozen(state), frozen(task)
    given = _run_step(method, "work", lambda: method.work(state, task, trainer, budget, key))
    after, update = _pair(method, "work", given, "the device's next state and its update")
    _checked(method, "work", after, method.device_state_type, "state")
    return after, _checked(method, "work", update, method.update_type, "update")


def choices(method: AnyMethod, report: DeviceReport) -> Sequence[Choice]:
    """Return the ratios at which a device could work, at least one, ascending. Raises MethodError."""
    given = _run_step(method, "choices", lambda: method.choices(report))
    if not isinstance(given, list | tuple) or not all(isinstance(one, Choice) for one in given):
        raise MethodError(f"{title(method, 'choices')} returns {_kind(given)}; expected a list of Choice")
    ratios = [one.ratio for one in given]
    if not ratios or ratios != sorted(set(ratios)):
        raise MethodError(
            f"{title(method, 'choices')} returns the ratios {ratios}; "
            "expected at least one, ascending, without repetition"
        )
    return given


@dataclasses.dataclass(frozen=True)
class _Tasks(Mapping[DeviceId, Any]):
    """The tasks of a round, each checked on access, because it may be made only then."""

    method: AnyMethod
    tasks: Mapping[DeviceId, Any]

    def __getitem__(self, device: DeviceId) -> Any:
        if device not in self.tasks:
            raise KeyError(device)
        task = _run_step(self.method, "plan", lambda: self.tasks[device])
        return _checked(self.method, "plan", task, self.method.task_type, "task")

    def __iter__(self) -> Iterator[DeviceId]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)


def title(method: AnyMethod, step: str) -> str:
    """Return the method and its step, as the beginning of an error message."""
    kind = type(method)
    return f"method {kind.__module__}:{kind.__qualname__}: `{step}`"


def frozen(value: T) -> T:
    """Make all arrays in `value` read-only, at any depth, and return it."""
    for _, leaf, _ in _leaves(value, ""):
        if isinstance(leaf, np.ndarray):
            leaf.flags.writeable = False
    return value


def _run_step(method: AnyMethod, step: str, call: Callable[[], T]) -> T:
    """Return the result of a step; an error in a user's step becomes a MethodError that names the user's
    line.
    """
    if type(method).__module__.startswith("fleetune."):
        return call()
    try:
        return call()
    except (FleetuneError, np.linalg.LinAlgError):
        raise
    except (Exception, SystemExit) as problem:  # a user's method may raise anything, even SystemExit
        why = as_line(problem)
        hint = f"; {_READ_ONLY}" if "read-only" in why else ""
        line = f"{title(method, step)} failed{_place(method, problem)}: {why}{hint}"
        raise MethodError(line) from problem


def _place(method: AnyMethod, problem: BaseException) -> str:
    """Return file and line of the user's code that ran last when `problem` was raised."""
    frames = traceback.extract_tb(problem.__traceback__)
    home = getattr(sys.modules.get(type(method).__module__), "__file__", None)
    own = [one for one in frames if one.filename == home or not is_library(one.filename)]
    return "".join(f" at {one.filename}:{one.lineno}" for one in own[-1:])


def _pair(method: AnyMethod, step: str, given: Any, due: str) -> tuple[Any, Any]:
    if isinstance(given, tuple) and len(given) == 2:
        return given
    raise MethodError(f"{title(method, step)} returns {_kind(given)}; it must return two things: {due}")


def _checked(method: AnyMethod, step: str, value: T, kind: type, what: str) -> T:
    """Return `value` with read-only arrays, after a check that the codec can encode all of it.

    Raises:
        MethodError: `value` is of another type than `kind`, or the codec cannot encode a part of it.
    """
    _check_type(method, step, value, kind, what)
    for place, leaf, dtypes in _leaves(value, what):
        if isinstance(leaf, np.ndarray):
            if dtypes and leaf.dtype.type not in dtypes:
                due = " or ".join(sorted(one.__name__ for one in dtypes))
                raise MethodError(
                    f"{title(method, step)} returns {place} of {leaf.dtype}; expected {due}: "
                    f".astype(np.{due.split()[0]})"
                )
            if not can_travel(leaf):
                raise MethodError(
                    f"{title(method, step)} returns {place} of {leaf.dtype}; "
                    "expected an array of float32, float64, int64 or bool"
                )
            leaf.flags.writeable = False
        elif not isinstance(leaf, _PLAIN):
            raise MethodError(
                f"{title(method, step)} returns {place}, which is {_kind(leaf)}; "
                "expected NumPy arrays, numbers, text, or dicts and tuples of these"
            )
    return value


def _check_type(method: AnyMethod, step: str, value: Any, kind: type, what: str) -> None:
    """Raise MethodError if `value` is neither of type `kind` nor has the fields as which it is stored."""
    if isinstance(value, kind):
        return
    if not (_has_fields(value) and _has_fields(kind) and _fields_of(value) <= _fields_of(kind)):
        raise MethodError(f"{title(method, step)} returns {_kind(value)}; expected {what} as {kind.__name__}")


def _has_fields(value: Any) -> bool:
    return dataclasses.is_dataclass(value) or hasattr(value, "__struct_fields__")


Leaf = tuple[str, Any, frozenset[type]]


def _leaves(value: Any, place: str, dtypes: frozenset[type] = frozenset()) -> Iterator[Leaf]:
    """Yield all values that are no containers, with their place and the element types in their field's type
    hint.
    """
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(one, f"{place}[{key}]", dtypes)
    elif isinstance(value, tuple | list):
        for number, one in enumerate(value):
            yield from _leaves(one, f"{place}[{number}]", dtypes)
    elif _has_fields(value):
        kind: Any = type(value)
        for name, due in _fields(kind).items():
            yield from _leaves(getattr(value, name), f"{place}.{name}", due)
    else:
        yield place, value, dtypes


def _fields_of(value: Any) -> AbstractSet[str]:
    kind: Any = value if isinstance(value, type) else type(value)
    return _fields(kind).keys()


@cache
def _fields(kind: Any) -> Mapping[str, frozenset[type]]:
    """Return the fields of a dataclass or struct, and the NumPy element types that their type hints name."""
    is_struct = issubclass(kind, msgspec.Struct)
    names = kind.__struct_fields__ if is_struct else [part.name for part in dataclasses.fields(kind)]
    try:
        hints = get_type_hints(kind)
    except (NameError, AttributeError, TypeError):  # a hint that cannot be resolved says nothing of arrays
        hints = {}
    return {name: _dtypes(hints.get(name)) for name in names}


def _dtypes(hint: Any) -> frozenset[type]:
    if isinstance(hint, type) and issubclass(hint, np.generic):
        return frozenset((hint,))
    return frozenset(one for inner in get_args(hint) for one in _dtypes(inner))


def _kind(value: Any) -> str:
    return "nothing (None)" if value is None else f"a {type(value).__name__}"
