"""Compares exported graphs with torch: both must compute the same outputs for the same inputs."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fleetune.coordinator.export.steps import BATCHES, Model, features_watched, frozen_shapes, inputs
from fleetune.protocols.bounds import MOST_IDS
from fleetune.protocols.bundle.bundle import ANSWER, CONTRAST, DISTILLATION, EVALUATE_GRADIENT, LOSSES
from fleetune.protocols.bundle.graph import Graph
from fleetune.protocols.bundle.onnx_file import write_onnx
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.model.torch_backbone import frozen_values
from fleetune.protocols.model.torch_batch_norm import SingleValueNorms
from fleetune.protocols.model.torch_dropout import Dropouts
from fleetune.protocols.model.torch_loss_terms import contrast, distillation
from fleetune.protocols.randomness import Key
from fleetune.protocols.tasks.torch_losses import mean_loss, sample_losses

SIZES = (7, 4, 2, 1)  # batch sizes; one sample is left out if torch itself fails on it
TOLERANCE = 1e-5  # of an array's norm
_NUDGE = 1e-6  # relative: about what rounding does to a deep model's activations
_NUDGES = 3
_SLACK = 16  # times the change of torch's own result under such nudges, where that exceeds the tolerance
_ATTEMPTS = 3  # random batches; at a kink of ReLU both sides may differ, and no nudge may show it

Arrays = dict[str, NDArray[Any]]
Run = Callable[[Arrays], Arrays]


def check(model: Model, module: nn.Module, graphs: Mapping[str, Graph], weights: FlatArray) -> None:
    """Compare all graphs with torch at several batch sizes, also with changed running statistics.

    Args:
        model: the traced model.
        module: the original module; it stays unchanged.
        graphs: the graphs by name, see `protocols.bundle.bundle`.
        weights: the weights, shape (spec.size,).

    Raises:
        ModelError: a graph differs from torch, or ONNX Runtime is missing.
    """
    for name, graph in graphs.items():
        compare(model, module, name, partial(_run, model.spec, _session(model.spec, graph), graph), weights)


def compare(model: Model, module: nn.Module, name: str, run: Run, weights: FlatArray) -> None:
    """Compare one graph with torch, as `check` does.

    Args:
        model: the traced model.
        module: the original module; it stays unchanged.
        name: the name of the graph.
        run: computes the graph's outputs from arrays by name; it must ignore arrays that it does not need.
        weights: the weights, shape (spec.size,).

    Raises:
        ModelError: the graph differs from torch.
    """
    reference, frozen = _Reference(model, module), frozen_values(model.spec, module)
    for index, num_samples in enumerate(SIZES):
        for attempt in range(_ATTEMPTS):
            key = Key.of("export", name, num_samples, attempt)
            tensors = _tensors(model.spec, weights, key if index else None) | frozen
            given = _inputs(model, name, num_samples, key)
            try:
                wanted = reference.run(name, tensors, given)
            except Exception as problem:  # a user's module may raise anything; e.g. a norm over one value
                if num_samples == 1:
                    break
                raise ModelError(
                    f"model {model.spec.name!r} cannot be exported: torch fails on {num_samples} random"
                    f" samples: {type(problem).__name__}: {_line(problem)}"
                ) from problem
            found = run(tensors | given)
            worst, error = differences(found, wanted)
            if error > TOLERANCE:
                worst, error = differences(found, wanted, reference.rounding(name, tensors, given, wanted))
            if error <= TOLERANCE:
                break
        else:
            raise ModelError(
                f"model {model.spec.name!r} cannot be exported: output {worst} of graph"
                f" {name} differs from torch's by a relative error of {error:.1e} with {num_samples} samples;"
                " agents with torch can train it"
            )


def differences(
    found: Arrays, wanted: Arrays, rounding: Mapping[str, float] | None = None
) -> tuple[str, float]:
    """Return the name and relative error of the array that differs most from its wanted value.

    The error is the norm of the difference, less the part that rounding explains, over the norm of the wanted
    value.
    """
    worst = ("", 0.0)
    for name, value in wanted.items():
        difference = _norm(found[name] - value) - _SLACK * (rounding or {}).get(name, 0.0)
        error = difference / (_norm(value) or 1.0)
        if not error <= worst[1]:  # also true for NaN
            worst = (name, error)
    return worst


class _Reference:
    """The original torch module, run with given weights."""

    def __init__(self, model: Model, module: nn.Module) -> None:
        self._model = model
        self._module = copy.deepcopy(module)

    def rounding(self, graph: str, tensors: Arrays, given: Arrays, wanted: Arrays) -> dict[str, float]:
        """Return the norm of each output's change when weights and samples change by a rounding error, by
        name.

        The norms are large where a gradient is pure rounding error, such as that of a bias before a norm, or
        where many values are at the kink of a ReLU.
        """
        found = dict.fromkeys(wanted, 0.0)
        for index in range(_NUDGES):
            rng = Key.of("nudge", index).generator()
            nudged = [
                {name: _nudged(value, rng) for name, value in arrays.items()} for arrays in (tensors, given)
            ]
            for name, value in self.run(graph, *nudged).items():
                found[name] = max(found[name], _norm(value - wanted[name]))
        return {name: size for name, size in found.items() if size > TOLERANCE * _norm(wanted[name])}

    def run(self, graph: str, tensors: Arrays, given: Arrays) -> Arrays:
        """Return a graph's outputs as torch computes them, by name."""
        module, model = self._module, self._model
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for name, value in tensors.items():
                own[name].copy_(torch.from_numpy(value))
            for name, buffer in module.named_buffers():
                if name.endswith("num_batches_tracked"):
                    buffer.fill_(int(given.get(BATCHES, np.array(1))) - 1)
        module.zero_grad()  # sets gradients to None
        module.train(graph not in (ANSWER, EVALUATE_GRADIENT, LOSSES))
        inputs = {name: torch.from_numpy(value) for name, value in given.items()}
        watched = Model(model.spec, module, (), model.samples, model.num_features, False)
        with (
            SingleValueNorms() if len(given["x"]) == 1 else nullcontext(),
            Dropouts(lambda index, *_: inputs[f"noise:{index}"]),
            features_watched(watched) as calls,
            torch.set_grad_enabled(graph != ANSWER),
        ):
            logits = module(inputs["x"])
        features = None if model.num_features is None else calls[0][0].flatten(1)
        if graph == ANSWER:
            found = {"logits": logits} if features is None else {"logits": logits, "features": features}
        elif graph == LOSSES:
            found = {"losses": sample_losses(model.task.loss, model.task.section, logits, inputs["y"])}
        else:
            found = self._gradients(graph, own, inputs, logits, features)
        return {name: value.detach().numpy() for name, value in found.items()}

    def _gradients(
        self,
        graph: str,
        own: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor],
        logits: Tensor,
        features: Tensor | None,
    ) -> dict[str, Tensor]:
        task = self._model.task
        loss = total = mean_loss(task.loss, task.section, logits, inputs["y"])
        if graph == DISTILLATION:
            total = total + distillation(
                logits, *(inputs[name] for name in ("teacher", "strength", "temperature"))
            )
        if graph == CONTRAST:
            assert features is not None
            names = ("near", "far", "strength", "temperature")
            total = total + contrast(features, *(inputs[name] for name in names))
        total.backward()  # type: ignore[no-untyped-call]
        found = {"loss": loss}
        for tensor in self._model.spec.tensors:
            value = own[tensor.name]
            if tensor.kind == "stat":
                found[f"statistic:{tensor.name}"] = value
            else:
                found[f"gradient:{tensor.name}"] = (
                    torch.zeros_like(value) if value.grad is None else value.grad
                )
        return found


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


def _tensors(spec: ModelSpec, weights: FlatArray, key: Key | None) -> Arrays:
    """Return the model's tensors by name; a key adds random changes to the running statistics."""
    found = {}
    for tensor, value in spec.views(weights):
        found[tensor.name] = value
        if key is not None and tensor.kind == "stat":
            noise = key.child(tensor.name).generator().normal(size=tensor.shape).astype(np.float32) / 4
            moved = value + noise if tensor.name.endswith("mean") else value * np.exp(noise)
            found[tensor.name] = moved.astype(np.float32)
    return found


def _inputs(model: Model, graph: str, num_samples: int, key: Key) -> Arrays:
    """Return a batch of random samples and all other inputs of a graph, by name.

    The first quarter of each sample is 0, so that maxima have ties.

    A part of each sample is 0, where maxima have several places.
    """
    rng = key.generator()
    found: Arrays = {}
    known = {tensor.name for tensor in model.spec.tensors} | frozen_shapes(model.spec).keys()
    for name, zeros in inputs(model, graph, num_samples).items():
        if name in known:
            continue
        found[name] = rng.normal(size=tuple(zeros.shape)).astype(np.float32)
    flat = found["x"].reshape(num_samples, -1)
    flat[:, : flat.shape[1] // 4] = 0
    if model.samples.vocabulary is not None:
        ids = rng.integers(min(model.samples.vocabulary, MOST_IDS), size=found["x"].shape)
        found["x"] = ids if model.samples.ids else ids.astype(np.float32)
    if "y" in found:
        found["y"] = _targets(model, found["y"], rng)
    for index, noise in enumerate(model.noises):
        if f"noise:{index}" in found:
            found[f"noise:{index}"] = noise.draw(key, index, num_samples)
    for name, value in (("strength", 0.7), ("temperature", 1.8), (BATCHES, 3.0)):
        if name in found:
            found[name] = np.array(value, np.float32)
    return found


def _targets(model: Model, normal: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Return random targets: class numbers, labels of 0 and 1, or real numbers, as the task needs."""
    if not normal.shape[1:]:
        return rng.integers(model.spec.num_classes, size=len(normal))
    return (normal > 0).astype(np.float32) if model.task.kind == "multi-label" else normal


def _nudged(value: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
    """Return the numbers changed by a random rounding error; integers stay unchanged."""
    if value.dtype != np.float32:
        return value
    return np.asarray(value * (1 + _NUDGE * rng.normal(size=value.shape)), np.float32)


def _norm(value: NDArray[Any]) -> float:
    return float(np.linalg.norm(value.astype(float)))


def _line(problem: Exception) -> str:
    return " ".join(str(problem).split())
