"""Adds gradients to a model's forward graph with onnxruntime-training, if that is installed.

The package adds them with its GradientGraphBuilder. The forward pass is written in primitive operators, so
that the package's normalisation operators are not used, whose gradients have pitfalls.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn

from fleetune.coordinator.export.graphs import forward_graph
from fleetune.coordinator.export.steps import prepare
from fleetune.coordinator.export.torch_comparison import Run, compare
from fleetune.coordinator.export.torch_reference import Arrays
from fleetune.protocols.bundle import ort_training
from fleetune.protocols.bundle.bundle import TRAIN
from fleetune.protocols.bundle.graph import Graph, Port
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.bundle.protobuf import fields, message, text
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.spec import FlatArray, ModelSpec, TensorSpec
from fleetune.protocols.tasks import CLASSIFICATION
from fleetune.protocols.tasks.task import Task

LOSS = "loss"
_GRAPH = 7  # field of a model
_SILENT = 4


def can_differentiate() -> bool:
    """True if onnxruntime-training is installed, and not only onnxruntime."""
    try:
        from onnxruntime.capi import _pybind_state
    except ImportError:
        return False
    return hasattr(_pybind_state, "GradientGraphBuilder")


def training_part(
    spec: ModelSpec, module: nn.Module, weights: FlatArray, task: Task = CLASSIFICATION
) -> dict[str, bytes]:
    """Make the files for onnxruntime-training (`Bundle.ort_training`) of a model, and compare them with
    torch.

    Args:
        spec: the description of the model.
        module: the model; it stays unchanged.
        weights: the weights at which the result is compared with torch, shape (spec.size,).
        task: the task whose loss the model computes.

    Raises:
        ModelError: onnxruntime-training cannot differentiate an operator, the result differs from torch, or
            the package is not installed.
    """
    forward = forward_graph(spec, module, task)
    known = {port.name for port in (*forward.inputs, *forward.outputs)}
    needed = [f"statistic:{one.name}" if one.kind == "stat" else one.name for one in spec.tensors]
    if unused := [name for name in needed if name not in known]:
        raise ModelError(
            f"model {spec.name}: its loss does not use tensor {unused[0]}, but onnxruntime-training needs a"
            " gradient of every tensor"
        )
    made = gradient_model(spec, forward)
    compare(prepare(spec, module, task), module, {TRAIN: _runner(spec, made)}, weights)
    return training_files(spec, made)


def gradient_model(spec: ModelSpec, forward: Graph) -> bytes:
    """Make an ONNX model of the loss and its gradients that only onnxruntime-training can run.

    Args:
        spec: the description of the model.
        forward: computes loss and statistic:<tensor> from x, y, noise:<k> and the spec's tensors by name.

    Returns:
        The encoded model. Each parameter's gradient is the output
        `protocols.bundle.ort_training.gradient(name)`.

    Raises:
        ModelError: onnxruntime-training cannot differentiate an operator, or is not installed.
    """
    if "Scan" in forward.operators:  # the package would end this process
        raise ModelError(
            f"model {spec.name}: onnxruntime-training has no gradient of Scan, the loop of a recurrent layer;"
            " agents train it with onnx or torch"
        )
    if not can_differentiate():
        raise ModelError(
            "onnxruntime-training is not installed here: pip uninstall onnxruntime, then"
            " pip install onnxruntime-training-cpu==1.19.2 (Python 3.12 or older, not for aarch64)"
        )
    from onnxruntime.capi._pybind_state import GradientGraphBuilder

    parameters = {tensor.name for tensor in _parameters(spec)}
    try:
        builder = GradientGraphBuilder(write_onnx(forward), {LOSS}, parameters, LOSS, _options())
        builder.build()
    except Exception as problem:  # the runtime's errors have no common type
        raise ModelError(f"model {spec.name}: {_reason(str(problem))}") from problem
    made: bytes = builder.get_model()
    return made


def training_files(spec: ModelSpec, model: bytes) -> dict[str, bytes]:
    """Return the content of `Bundle.ort_training`, as `protocols.bundle.ort_training` describes it.

    Args:
        spec: the description of the model.
        model: a model made by `gradient_model` and checked by the caller.
    """
    outputs = [LOSS, *(f"statistic:{tensor.name}" for tensor in spec.tensors if tensor.kind == "stat")]
    outputs += [ort_training.gradient_flag(tensor.name) for tensor in _parameters(spec)]
    return {ort_training.TRAINING_MODEL: ort_training.cut(model + _accumulators(spec), outputs)}


def _runner(spec: ModelSpec, model: bytes) -> Run:
    """Return a function that runs a model with gradients.

    Its inputs and outputs have the names of the graph `train`.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(model, _options(), providers=["CPUExecutionProvider"])
    names = {ort_training.gradient(one.name): f"gradient:{one.name}" for one in _parameters(spec)}
    inputs = [port.name for port in session.get_inputs()]
    outputs = [port.name for port in session.get_outputs()]

    def run(given: Arrays) -> Arrays:
        try:
            found = session.run(outputs, {name: given[name] for name in inputs})
        except Exception as problem:  # the runtime's errors have no common type
            raise ModelError(f"model {spec.name}: {_reason(str(problem))}") from problem
        return {names.get(name, name): value for name, value in zip(outputs, found, strict=True)}

    return run


def _options() -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = _SILENT  # otherwise it logs each of its passes
    return options


def _parameters(spec: ModelSpec) -> list[TensorSpec]:
    return [tensor for tensor in spec.tensors if tensor.kind != "stat"]


def _accumulators(spec: ModelSpec) -> bytes:
    """Return bytes that, appended to an ONNX model with gradients, make it add each gradient to a buffer."""
    parameters = _parameters(spec)
    buffers = [Port(ort_training.gradient_buffer(one.name), "f4", one.shape) for one in parameters]
    flags = tuple(Port(ort_training.gradient_flag(one.name), "?", (1,)) for one in parameters)
    ports = Graph((*buffers, Port(ort_training.RESET, "?", (1,))), flags, (), ())
    graph = next(field.value for field in fields(write_onnx(ports)) if field.number == _GRAPH)
    return message(_GRAPH, [graph, *(message(1, _accumulator(one.name)) for one in parameters)])


def _accumulator(tensor: str) -> Iterable[bytes]:
    """Yield the encoded fields of an ONNX node that adds one tensor's gradient to its buffer."""
    yield text(1, ort_training.gradient_buffer(tensor))
    yield text(1, ort_training.gradient(tensor))
    yield text(1, ort_training.RESET)
    yield text(2, ort_training.gradient_flag(tensor))
    yield text(4, "InPlaceAccumulatorV2")
    yield text(7, "com.microsoft")


def _reason(problem: str) -> str:
    """Return onnxruntime-training's message about a graph that it cannot differentiate, as one line."""
    if found := re.search(r"gradient builder has not been registered: (\w+)", problem):
        return f"onnxruntime-training has no gradient of {found[1]}; agents train it with onnx or torch"
    line = " ".join(problem.split())
    return f"onnxruntime-training cannot compute its gradients: {line.rpartition('&) ')[2][-300:]}"
