"""Traces the torch operations of a step for any batch size, by comparing traces at two batch sizes.

An integer that differs between the two traces is assumed to be times * n + plus, where n is the number of
samples. Two points do not prove that, so `coordinator.export.torch_comparison` runs every graph at more
sizes.
"""

import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload

from fleetune.coordinator.export.module_paths import Paths
from fleetune.coordinator.export.recorder import Call, Decompositions, Recorder, Ref, refs, without_values
from fleetune.protocols.errors import ModelError

_SHAPED_ALIKE = re.compile(r"aten\.(\w+_like|new_\w+)\.\w+")
SIZES = (3, 5)  # neither 1, which torch treats apart, nor with a common divisor

# Operators that torch replaces by those that have rules here. The first one imports torch's compiler, which
# takes a second; so the operators of the losses have rules.
DECOMPOSED = """
    _prelu_kernel _prelu_kernel_backward addcdiv addcmul celu elu elu_backward gelu
    gelu_backward glu glu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward
    leaky_relu_backward linalg_vector_norm log_sigmoid_backward log_sigmoid_forward logsumexp
    mish mish_backward pixel_shuffle pixel_unshuffle selu sigmoid_backward silu_backward
    softplus_backward tanh_backward threshold
""".split()  # noqa: SIM905 - forty strings read worse
# never replaced: a refusal names them better than what they consist of
_WHOLE = re.compile(
    r"bernoulli|dropout|rand|normal|uniform|exponential|rrelu|multinomial|poisson|copy|set_|resize"
)


@dataclass(frozen=True)
class Open:
    """A size that depends on the number of samples n: times * n + plus."""

    times: int
    plus: int = 0


Size = int | Open
Shape = tuple[Size, ...]


@dataclass(frozen=True)
class Operation:
    """One call of a torch operator.

    Attributes:
        name: the name of its result.
        target: the operator, such as "aten.add.Tensor".
        args, kwargs: the arguments, with `Ref` for results and `Open` for sizes that depend on the batch.
        shapes, dtypes: the shape and type of each result.
        path: the module whose forward or backward pass contains it.
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    path: str

    @property
    def shape(self) -> Shape:
        """The shape of the operation's first result."""
        return self.shapes[0]


@dataclass(frozen=True)
class Trace:
    """The operations of a step in their order.

    Attributes:
        inputs: the shape and type of each input of the step, by name.
        outputs: the reference of each output of the step, by name.
        constants: tensors of the module that are not inputs, by name.
        operations: the operations.
    """

    inputs: dict[str, tuple[Shape, torch.dtype]]
    outputs: dict[str, Ref]
    constants: dict[str, Tensor]
    operations: tuple[Operation, ...]


Step = Callable[[Mapping[str, Tensor]], dict[str, dict[str, Tensor]]]


def trace(
    name: str,
    module: nn.Module,
    make_step: Callable[[Callable[[Tensor], None]], Step],
    make_inputs: Callable[[int], Mapping[str, Mapping[str, Tensor]]],
    with_rules: Collection[str],
) -> dict[str, Trace]:
    """Trace the step of several graphs for any batch size, and return each graph's trace by name.

    Args:
        name: the name of the model, for errors.
        module: the module whose forward pass the step runs.
        make_step: returns the step, which returns the outputs by graph and name. The step calls its argument
            with each loss before its backward pass.
        make_inputs: returns the inputs of each graph for a number of samples.
        with_rules: names of operators that stay whole; torch takes others apart where it can.

    Raises:
        ModelError: the step cannot be traced, or no graph can express how it depends on the batch size.
    """
    runs = []
    table = _decompositions(frozenset(with_rules))
    for num_samples in SIZES:
        wanted = make_inputs(num_samples)
        given = {label: tensor for inputs in wanted.values() for label, tensor in inputs.items()}
        runs.append(_run(name, module, make_step, given, table))
    whole = _merged(name, *runs)
    return {graph: _cut(whole, graph, inputs) for graph, inputs in wanted.items()}


@cache
def _decompositions(with_rules: frozenset[str]) -> dict[Any, Callable[..., Any]]:
    """Return torch's own decompositions of operators, by operator, without those that have rules."""
    table: dict[Any, Callable[..., Any]] = {}
    core: Any = core_aten_decompositions()
    for operator, function in core.items():
        if not isinstance(operator, OpOverload) or operator.namespace != "aten":
            continue
        name = operator.overloadpacket.__name__
        if name.removesuffix("_") not in with_rules and not _WHOLE.search(name):
            table[operator] = function
    return table | get_decompositions([getattr(torch.ops.aten, one) for one in DECOMPOSED])


@dataclass(frozen=True)
class _Run:
    """What was recorded while a step ran on one batch.

    Attributes:
        inputs: the step's inputs by name.
        recorder: the calls and constants.
        paths: the module of each call.
        outputs: the names of the results, by "<graph>/<name>".
    """

    inputs: Mapping[str, Tensor]
    recorder: Recorder
    paths: Paths
    outputs: dict[str, str]


def _run(
    name: str,
    module: nn.Module,
    make_step: Callable[[Callable[[Tensor], None]], Step],
    inputs: Mapping[str, Tensor],
    table: Decompositions,
) -> _Run:
    """Record a step. With zeros as values this is fast; operators that fail on zeros run without values."""
    for values in (nullcontext(inputs), without_values(inputs)):
        try:
            with values as given:
                return _recorded(module, make_step, given, table)
        except ModelError:
            raise
        except Exception as problem:  # noqa: BLE001 - torch and a user's module may raise anything
            failure = problem
    raise ModelError(
        f"model {name!r} cannot be exported: {_where(module, failure)} {_failure(failure)};"
        " agents with torch can train it"
    ) from failure


def _recorded(
    module: nn.Module,
    make_step: Callable[[Callable[[Tensor], None]], Step],
    inputs: Mapping[str, Tensor],
    table: Decompositions,
) -> _Run:
    recorder = Recorder(inputs, table)
    with Paths(module, lambda: len(recorder.calls)) as paths:
        step = make_step(paths.watch)
        with torch.random.fork_rng(devices=[]), recorder:
            by_graph = step(inputs)
    outputs = {
        f"{graph}/{label}": recorder.name_of(one)
        for graph, outs in by_graph.items()
        for label, one in outs.items()
    }
    return _Run(inputs, recorder, paths, outputs)


def _where(module: nn.Module, problem: Exception) -> str:
    """Return the path of the innermost module in whose code an error was raised."""
    paths, found = {id(part): path for path, part in module.named_modules()}, ""
    for frame, _ in traceback.walk_tb(problem.__traceback__):
        found = paths.get(id(frame.f_locals.get("self")), found) or found
    return found or "the model itself"


def _failure(problem: Exception) -> str:
    """Return in one line why tracing failed, with a remedy where the cause is known."""
    if "DataDependent" in type(problem).__name__ or "data-dependent" in str(problem):
        return (
            "lets values of the data decide in Python (if, while, a mask as an index, .item()), and a graph"
            " computes the same for all data; choose with torch.where(condition, a, b)"
        )
    return "fails while it is traced: " + " ".join(f"{type(problem).__name__}: {problem}".split())[:400]


def _merged(name: str, first: _Run, second: _Run) -> Trace:
    """Merge the records of two batches, which differ only in sizes; outputs are called "<graph>/<name>"."""
    calls, twins = first.recorder.calls, second.recorder.calls
    if [call.target for call in calls] != [call.target for call in twins] or first.outputs != second.outputs:
        raise ModelError(f"model {name!r} cannot be exported: its operations depend on the batch size")
    inputs = {
        label: (_shape(tensor.shape, second.inputs[label].shape), tensor.dtype)
        for label, tensor in first.inputs.items()
    }
    operations = []
    for index, (call, twin) in enumerate(zip(calls, twins, strict=True)):
        try:
            operations.append(_operation(call, twin, first.paths.of(index)))
        except ValueError as problem:
            where = first.paths.of(index) or "the model itself"
            raise ModelError(
                f"model {name!r} cannot be exported: {where} uses {call.target} in a way that depends on the"
                f" batch size ({problem}); agents with torch can train it"
            ) from problem
        except Exception as problem:  # torch cannot compare sizes that depend on the data
            where = first.paths.of(index) or "the model itself"
            raise ModelError(
                f"model {name!r} cannot be exported: {where} uses {call.target} and {_failure(problem)};"
                " agents with torch can train it"
            ) from problem
    outputs = {label: Ref(made) for label, made in first.outputs.items()}
    return Trace(inputs, outputs, first.recorder.constants, tuple(operations))


def _operation(call: Call, twin: Call, path: str) -> Operation:
    args = _arguments(call.args, twin.args)
    if _SHAPED_ALIKE.fullmatch(call.target):
        args = (None, *args[1:])  # only the shape of this argument matters
    pairs = list(zip(call.results, twin.results, strict=True))
    return Operation(
        call.name,
        call.target,
        args,
        _arguments(call.kwargs, twin.kwargs),
        tuple(_shape(one, other) for (one, _), (other, _) in pairs),
        tuple(dtype for (_, dtype), _ in pairs),
        path,
    )


def _cut(whole: Trace, graph: str, inputs: Collection[str]) -> Trace:
    """Return the part of a trace that computes one graph from these inputs."""
    start = f"{graph}/"
    outputs = {name.removeprefix(start): ref for name, ref in whole.outputs.items() if name.startswith(start)}
    wanted = {ref.name for ref in outputs.values()}
    used = []
    for operation in reversed(whole.operations):
        if operation.name in wanted:
            used.append(operation)
            wanted.update(ref.name for ref in refs((operation.args, operation.kwargs)))
    constants = {name: value for name, value in whole.constants.items() if name in wanted}
    return Trace({name: whole.inputs[name] for name in inputs}, outputs, constants, tuple(reversed(used)))


def _arguments(value: Any, twin: Any) -> Any:
    if isinstance(value, Ref):
        if value != twin:
            raise ValueError("its operands differ between batch sizes")
        return value
    if isinstance(value, dict):
        return {key: _arguments(value[key], twin[key]) for key in value}
    if isinstance(value, tuple):
        return tuple(_arguments(a, b) for a, b in zip(value, twin, strict=True))
    if isinstance(value, int) and not isinstance(value, bool):
        return _size(value, twin)
    if repr(value) != repr(twin):  # two NaN are not equal
        raise ValueError(f"an argument is {value} at one batch size and {twin} at another")
    return value


def _shape(shape: Sequence[int], twin: Sequence[int]) -> Shape:
    return tuple(_size(one, two) for one, two in zip(shape, twin, strict=True))


def _size(value: int, twin: int) -> Size:
    if value == twin:
        return int(value)
    few, many = SIZES
    times, rest = divmod(twin - value, many - few)
    if rest:
        raise ValueError(f"a size is {value} for {few} samples and {twin} for {many}")
    return Open(times, value - times * few)
