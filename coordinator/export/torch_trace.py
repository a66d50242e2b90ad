"""Traces the torch operations of a step for any batch size, by comparing traces at two batch sizes.

An integer that differs between the two traces is assumed to be times * n + plus, where n is the number of
samples. Two points do not prove that, so `coordinator.export.torch_comparison` runs every graph at more
sizes.
"""

import re
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from fleetune.coordinator.export.module_paths import Paths
from fleetune.protocols.errors import ModelError

_SHAPED_ALIKE = re.compile(r"aten\.(\w+_like|new_\w+)\.\w+")
SIZES = (3, 5)  # neither 1, which torch treats apart, nor with a common divisor

# operators that torch replaces by those that have rules here
DECOMPOSED = """
    _prelu_kernel _prelu_kernel_backward addcdiv addcmul celu elu elu_backward gelu
    gelu_backward glu glu_backward hardsigmoid hardsigmoid_backward hardswish hardswish_backward
    leaky_relu_backward linalg_vector_norm log_sigmoid_backward log_sigmoid_forward logsumexp
    mish mish_backward pixel_shuffle pixel_unshuffle selu sigmoid_backward silu_backward
    softplus_backward tanh_backward threshold xlogy
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
class Ref:
    """A reference, by name, to an input or to the result of an operation."""

    name: str


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
    traced = []
    for num_samples in SIZES:
        with Paths(module) as paths:
            step, wanted = make_step(paths.watch), make_inputs(num_samples)
            given = {label: tensor for inputs in wanted.values() for label, tensor in inputs.items()}
            made, outputs = _traced(name, module, step, given, _decompositions(frozenset(with_rules)))
        traced.append((made, paths, list(given), outputs))
    whole = _merged(name, traced)
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


def _traced(
    name: str, module: nn.Module, step: Step, given: Mapping[str, Tensor], table: Mapping[Any, Any]
) -> tuple[fx.GraphModule, list[str]]:
    """Return the trace of a step by torch, and the step's outputs as "<graph>/<name>"."""
    outputs: list[str] = []

    def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
        by_graph = step(dict(zip(given, tensors, strict=True)))
        found = {f"{graph}/{label}": one for graph, outs in by_graph.items() for label, one in outs.items()}
        outputs.extend(found)
        return tuple(found.values())

    try:
        made = make_fx(flat, table, tracing_mode="fake", _allow_non_fake_inputs=True)(*given.values())
    except ModelError:
        raise
    except Exception as problem:  # torch and a user's module may raise anything
        raise ModelError(
            f"model {name!r} cannot be exported: {_where(module, problem)} {_failure(problem)};"
            " agents with torch can train it"
        ) from problem
    return made, outputs


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


def _merged(name: str, traced: Sequence[tuple[fx.GraphModule, Paths, list[str], list[str]]]) -> Trace:
    """Merge two traces that differ only in sizes, with outputs called "<graph>/<name>"."""
    (first, paths, given, names), (second, _, _, others) = traced
    nodes, twins = list(first.graph.nodes), list(second.graph.nodes)
    if [node.target for node in nodes] != [node.target for node in twins] or names != others:
        raise ModelError(f"model {name!r} cannot be exported: its operations depend on the batch size")
    labels = dict(zip([node.name for node in nodes if node.op == "placeholder"], given, strict=True))
    renamed = {node.name: labels.get(node.name, f"%{index}") for index, node in enumerate(nodes)}
    constants = {
        renamed[node.name]: getattr(first, node.target).detach() for node in nodes if node.op == "get_attr"
    }
    operations, inputs, outputs = [], {}, {}
    for index, (node, twin) in enumerate(zip(nodes, twins, strict=True)):
        try:
            match node.op:
                case "placeholder":
                    shapes, dtypes = _results(node, twin)
                    inputs[renamed[node.name]] = (shapes[0], dtypes[0])
                case "call_function":
                    operations.append(_operation(node, twin, renamed, paths.of(index)))
                case "output":
                    outputs = dict(zip(names, _arguments(node.args[0], twin.args[0], renamed), strict=True))
        except ValueError as problem:
            where = paths.of(index) or "the model itself"
            raise ModelError(
                f"model {name!r} cannot be exported: {where} uses {node.target} in a way that depends on the"
                f" batch size ({problem}); agents with torch can train it"
            ) from problem
        except Exception as problem:  # torch cannot compare sizes that depend on the data
            where = paths.of(index) or "the model itself"
            raise ModelError(
                f"model {name!r} cannot be exported: {where} uses {node.target} and {_failure(problem)};"
                " agents with torch can train it"
            ) from problem
    return Trace(inputs, outputs, constants, tuple(operations))


def _operation(node: fx.Node, twin: fx.Node, renamed: Mapping[str, str], path: str) -> Operation:
    args = _arguments(node.args, twin.args, renamed)
    if _SHAPED_ALIKE.fullmatch(str(node.target)):
        args = (None, *args[1:])  # only the shape of this argument matters
    kwargs = _arguments(node.kwargs, twin.kwargs, renamed)
    return Operation(renamed[node.name], str(node.target), args, kwargs, *_results(node, twin), path)


def _cut(whole: Trace, graph: str, inputs: Collection[str]) -> Trace:
    """Return the part of a trace that computes one graph from these inputs."""
    start = f"{graph}/"
    outputs = {name.removeprefix(start): ref for name, ref in whole.outputs.items() if name.startswith(start)}
    wanted = {ref.name for ref in outputs.values()}
    used = []
    for operation in reversed(whole.operations):
        if operation.name in wanted:
            used.append(operation)
            wanted.update(ref.name for ref in _refs((operation.args, operation.kwargs)))
    constants = {name: value for name, value in whole.constants.items() if name in wanted}
    return Trace({name: whole.inputs[name] for name in inputs}, outputs, constants, tuple(reversed(used)))


def _refs(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [ref for part in parts for ref in _refs(part)]


def _results(node: fx.Node, twin: fx.Node) -> tuple[tuple[Shape, ...], tuple[torch.dtype, ...]]:
    values, others = (
        value if isinstance(value, (tuple, list)) else (value,)
        for value in (node.meta.get("val"), twin.meta.get("val"))
    )
    pairs = [(a, b) for a, b in zip(values, others, strict=True) if isinstance(a, Tensor)]
    shapes = tuple(
        tuple(_size(one, two) for one, two in zip(a.shape, b.shape, strict=True)) for a, b in pairs
    )
    return shapes, tuple(a.dtype for a, _ in pairs)


def _arguments(value: Any, twin: Any, renamed: Mapping[str, str]) -> Any:
    if isinstance(value, fx.Node):
        if value.name != twin.name:
            raise ValueError("its operands differ between batch sizes")
        return Ref(renamed[value.name])
    if isinstance(value, dict):
        return {key: _arguments(value[key], twin[key], renamed) for key in value}
    if isinstance(value, (tuple, list)):
        return tuple(_arguments(a, b, renamed) for a, b in zip(value, twin, strict=True))
    if isinstance(value, int) and not isinstance(value, bool):
        return _size(value, twin)
    if repr(value) != repr(twin):  # two NaN are not equal
        raise ValueError(f"an argument is {value} at one batch size and {twin} at another")
    return value


def _size(value: int, twin: int) -> Size:
    if value == twin:
        return int(value)
    few, many = SIZES
    times, rest = divmod(twin - value, many - few)
    if rest:
        raise ValueError(f"a size is {value} for {few} samples and {twin} for {many}")
    return Open(times, value - times * few)
