"""Compares exported graphs with torch: both must compute the same outputs for the same inputs.

The reference is the original module in float64. An output is accepted if its error is at most a small
multiple of the error that torch itself makes in float32, or is below a small part of the output's scale.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fleetune.coordinator.export.steps import BATCHES, Model, frozen_shapes, inputs
from fleetune.coordinator.export.torch_reference import Arrays, Reference
from fleetune.protocols.bounds import MOST_IDS
from fleetune.protocols.bundle.graph import Graph
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.spec import FlatArray, ModelSpec, TensorSpec
from fleetune.protocols.model.torch_backbone import frozen_values
from fleetune.protocols.randomness import Key

SIZES = (7, 4, 1)  # batch sizes; one sample is left out if torch itself fails on it
FLOOR = 2e-6  # of an output's scale
TIMES_TORCH = 8  # the multiple of torch's own error
_ATTEMPTS = 5  # random batches; at a kink of ReLU or max pooling, rounding decides between two gradients
_NUDGE = 2.0**-23  # relative change of a float32 number by rounding

Run = Callable[[Arrays], Arrays]


def check(model: Model, module: nn.Module, graphs: Mapping[str, Graph], weights: FlatArray) -> None:
    """Compare all graphs with torch at several batch sizes, with given and with changed tensors.

    Args:
        model: the traced model.
        module: the original module; it stays unchanged.
        graphs: the graphs by name, see `protocols.bundle.bundle`.
        weights: the weights, shape (spec.size,).

    Raises:
        ModelError: a graph differs from torch, or ONNX Runtime is missing.
    """
    runs = {
        name: partial(_run, model.spec, _session(model.spec, graph), graph) for name, graph in graphs.items()
    }
    compare(model, module, runs, weights)


def compare(model: Model, module: nn.Module, runs: Mapping[str, Run], weights: FlatArray) -> None:
    """Compare graphs with torch, as `check` does.

    Args:
        model: the traced model.
        module: the original module; it stays unchanged.
        runs: for each graph, the function that computes its outputs by name from arrays by name, among
            which are more than it needs.
        weights: the weights, shape (spec.size,).

    Raises:
        ModelError: a graph differs from torch.
    """
    torch_runs, frozen = _Torch(model, module), frozen_values(model.spec, module)
    given_tensors = {tensor.name: value for tensor, value in model.spec.views(weights)} | frozen
    moved_tensors = {
        tensor.name: _moved(tensor, value) for tensor, value in model.spec.views(weights)
    } | frozen
    for index, num_samples in enumerate(SIZES):
        waiting = dict(runs)
        for attempt in range(_ATTEMPTS):
            key = Key.of("export", num_samples, attempt)
            tensors = moved_tensors if index else given_tensors
            given = _inputs(model, list(runs), num_samples, key)
            try:
                wanted = torch_runs.outputs(list(waiting), tensors, given, thorough=attempt > 0)
            except Exception as problem:  # a user's module may raise anything; e.g. a norm over one value
                if num_samples == 1:
                    return
                raise ModelError(
                    f"model {model.spec.name!r} cannot be exported: torch fails on {num_samples} random"
                    f" samples: {type(problem).__name__}: {_line(problem)}"
                ) from problem
            judged = {
                name: worst(model.spec, run(tensors | given), *wanted[name]) for name, run in waiting.items()
            }
            waiting = {name: run for name, run in waiting.items() if not judged[name][1] <= 1}
            if not waiting:
                break
        for name in waiting:
            output, excess = judged[name]
            raise ModelError(
                f"model {model.spec.name!r} cannot be exported: output {output} of graph {name} differs from"
                f" torch's by {excess:.2g} times what rounding explains, with {num_samples} samples;"
                " agents with torch can train it"
            )


def worst(spec: ModelSpec, found: Arrays, exact: Arrays, rounding: Mapping[str, float]) -> tuple[str, float]:
    """Return the output with the largest error, and the error as a multiple of the largest that is accepted.

    Args:
        spec: the description of the model.
        found: a graph's outputs by name.
        exact: the reference by name.
        rounding: for each output, the norm of torch's own error in float32.
    """
    result = ("", 0.0)
    scales = _scales(spec, exact)
    for name, value in exact.items():
        allowed = TIMES_TORCH * rounding[name] + FLOOR * scales[name]
        error = _norm(found[name] - value)
        excess = error / allowed if allowed else float("inf") if error else 0.0
        if not excess <= result[1]:  # also true for NaN
            result = (name, excess)
    return result


def _scales(spec: ModelSpec, exact: Arrays) -> dict[str, float]:
    """Return the norm that each output would have if nothing cancelled in it.

    A running mean is measured by the standard deviation that it is used with. A gradient may be 0 in theory,
    such as that of a bias before a norm; it is measured by the gradients of its layer.
    """
    scales = {name: _norm(value) for name, value in exact.items()}
    for name in exact:
        variance = f"{name.removesuffix('mean')}var"
        if name.startswith("statistic:") and name.endswith("mean") and variance in exact:
            scales[name] = max(scales[name], _norm(np.sqrt(np.abs(exact[variance]))))
    gradients = [one for one in spec.tensors if f"gradient:{one.name}" in exact]
    of_layers = dict[object, float]()  # the largest root mean square of a gradient
    for one in gradients:
        size = scales[f"gradient:{one.name}"] / math.sqrt(one.size)
        of_layers[one.layer] = max(size, of_layers.get(one.layer, 0.0))
    for one in gradients:
        name = f"gradient:{one.name}"
        scales[name] = max(scales[name], of_layers[one.layer] * math.sqrt(one.size))
    return scales


class _Torch:
    """The original module, in float64 and in float32."""

    def __init__(self, model: Model, module: nn.Module) -> None:
        self._single = Reference(model, module, torch.float32)
        self._double: Reference | None = Reference(model, module, torch.float64)

    def outputs(
        self, graphs: list[str], tensors: Arrays, given: Arrays, *, thorough: bool
    ) -> dict[str, tuple[Arrays, dict[str, float]]]:
        """For each graph, the exact outputs, and the norms of torch's own errors in float32.

        A thorough look takes the largest errors of four runs, three of them with weights and samples changed
        by rounding. They show what happens at kinks of ReLU and max pooling, where rounding decides between
        two gradients. If the module cannot compute in float64, torch's float32 outputs stand for the exact
        ones, and these changes for the errors: a backward stable algorithm makes errors of that size.
        """
        single = self._single.run(graphs, tensors, given)
        exact, runs = self._exact(graphs, tensors, given), [single]
        if thorough or exact is None:
            runs += [
                self._single.run(graphs, _nudged(tensors, index), _nudged(given, index)) for index in range(3)
            ]
        exact = exact or single
        return {name: (exact[name], _errors(exact[name], [one[name] for one in runs])) for name in graphs}

    def _exact(self, graphs: list[str], tensors: Arrays, given: Arrays) -> dict[str, Arrays] | None:
        """Return the outputs in float64; None if the module computes in float32 but not in float64."""
        if self._double is None:
            return None
        try:
            return self._double.run(graphs, tensors, given)
        except Exception:  # noqa: BLE001 - a user's module may raise anything
            self._double = None
            return None


def _errors(exact: Arrays, others: list[Arrays]) -> dict[str, float]:
    return {name: max(_norm(other[name] - value) for other in others) for name, value in exact.items()}


def _nudged(arrays: Arrays, index: int) -> Arrays:
    """Float numbers changed by rounding errors; integers stay."""
    rng = Key.of("nudge", index).generator()
    return {
        name: value
        if value.dtype != np.float32
        else np.asarray(value * (1 + _NUDGE * rng.normal(size=value.shape)), np.float32)
        for name, value in arrays.items()
    }


def _session(spec: ModelSpec, graph: Graph) -> Any:
    try:
        import onnxruntime
    except ImportError as problem:
        raise ModelError(
            f"model {spec.name!r} cannot be exported: onnxruntime is missing, which compares its graphs with"
            " torch; pip install onnxruntime"
        ) from problem
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(write_onnx(graph), options, providers=["CPUExecutionProvider"])
    except Exception as problem:  # its exceptions have no common base
        raise ModelError(f"model {spec.name!r} cannot be exported: {_line(problem)}") from problem


def _run(spec: ModelSpec, session: Any, graph: Graph, given: Arrays) -> Arrays:
    feeds = {port.name: given[port.name] for port in graph.inputs}
    try:
        found = dict(zip(graph.output_names, session.run(None, feeds), strict=True))
    except Exception as problem:  # its exceptions have no common base
        raise ModelError(f"model {spec.name!r} cannot be exported: {_line(problem)}") from problem
    statistics = {
        f"statistic:{tensor.name}": given[tensor.name] for tensor in spec.tensors if tensor.kind == "stat"
    }
    return statistics | found


def _moved(tensor: TensorSpec, value: NDArray[Any]) -> NDArray[np.float32]:
    """Return a tensor changed at random, as training changes it.

    Biases of 0 and scales of 0 or 1e-6 would hide the faults of what they multiply.
    """
    noise = Key.of("export", tensor.name).generator().standard_normal(tensor.shape, np.float32)
    if tensor.kind == "stat":
        moved = value + noise / 4 if tensor.name.endswith("mean") else value * np.exp(noise / 4)
    else:
        spread = float(np.std(value))
        moved = value + noise * np.float32((spread if spread > 1e-4 else 1) / 10)
    return np.asarray(moved, np.float32)


def _inputs(model: Model, graphs: list[str], num_samples: int, key: Key) -> Arrays:
    """Return a batch of random samples and all other inputs of these graphs, by name.

    The first quarter of each sample is 0, so that maxima have ties.
    """
    rng = key.generator()
    found: Arrays = {}
    known = {tensor.name for tensor in model.spec.tensors} | frozen_shapes(model.spec).keys()
    shapes = {
        name: zeros.shape for graph in graphs for name, zeros in inputs(model, graph, num_samples).items()
    }
    for name, shape in shapes.items():
        if name not in known:
            found[name] = rng.normal(size=tuple(shape)).astype(np.float32)
    flat = found["x"].reshape(num_samples, -1)
    flat[:, : flat.shape[1] // 4] = 0
    if model.samples.vocabulary is not None:
        ids = _ids(rng, found["x"].shape, min(model.samples.vocabulary, MOST_IDS))
        found["x"] = ids if model.samples.ids else ids.astype(np.float32)
    if model.spec.reads.inputs:
        found["x"] = model.spec.reads.valid(found["x"])
    if "y" in found:
        found["y"] = _targets(model, found["y"], rng)
    for index, noise in enumerate(model.noises):
        if f"noise:{index}" in found:
            found[f"noise:{index}"] = noise.draw(key, index, num_samples)
    for name, value in (("strength", 0.7), ("temperature", 1.8), (BATCHES, 3.0)):
        if name in found:
            found[name] = np.array(value, np.float32)
    return found


def _ids(rng: np.random.Generator, shape: tuple[int, ...], vocabulary: int) -> NDArray[np.int64]:
    """Return random token ids: as many different ones as fit, and some of them twice."""
    count = math.prod(shape)
    ids = (rng.permutation(count) + rng.integers(vocabulary)) % vocabulary
    if count <= vocabulary:
        ids[: count // 4] = ids[count // 4 : 2 * (count // 4)]
    return ids.reshape(shape)


def _targets(model: Model, normal: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Return random targets: class numbers, labels of 0 and 1, or real numbers, as the task needs."""
    if not normal.shape[1:]:
        return rng.integers(model.spec.num_classes, size=len(normal))
    return (normal > 0).astype(np.float32) if model.task.kind == "multi-label" else normal


def _norm(value: NDArray[Any]) -> float:
    return float(np.linalg.norm(value.astype(float, copy=False)))


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split())
