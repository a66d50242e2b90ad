"""Exports the training graphs of a model, each compared with torch."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fleetune.coordinator.export import steps
from fleetune.coordinator.export.onnx_lowering import RULES, lower
from fleetune.coordinator.export.torch_comparison import check
from fleetune.coordinator.export.torch_trace import trace
from fleetune.protocols.bundle.bundle import (
    ANSWER,
    CONTRAST,
    DISTILLATION,
    EVALUATE_GRADIENT,
    LOSSES,
    TRAIN,
)
from fleetune.protocols.bundle.graph import Graph
from fleetune.protocols.model.noise import Noise
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.tasks import CLASSIFICATION
from fleetune.protocols.tasks.task import Task


@dataclass(frozen=True)
class Exported:
    """Graphs, noises and input type of a model, as `protocols.bundle.bundle.Bundle` stores them."""

    graphs: dict[str, Graph]
    noises: tuple[Noise, ...]
    input_type: Literal["f4", "i8"]


def export(spec: ModelSpec, module: nn.Module, weights: FlatArray, task: Task = CLASSIFICATION) -> Exported:
    """Export the graphs of a model.

    Args:
        spec: the description of the model.
        module: the model; it stays unchanged.
        weights: the weights at which the graphs are compared with torch, shape (spec.size,).
        task: the task whose loss the graphs compute.

    Raises:
        ModelError: an operator or a use of the batch size has no ONNX form, a graph differs from torch, or
            ONNX Runtime is missing.
    """
    model = steps.prepare(spec, module, task)
    names = [TRAIN, EVALUATE_GRADIENT, ANSWER]
    names += [DISTILLATION] if task.kind == "classification" else []
    names += [] if model.num_features is None else [CONTRAST]
    names += [LOSSES] if task.users_loss else []
    training = [name for name in names if name in steps.TRAINING]
    # apart from `evaluate-gradient`: torch chooses other operators where a gradient is needed, as in LSTM
    answers = [name for name in names if name in (ANSWER, LOSSES)]
    made = _graphs(model, training) | _graphs(model, [EVALUATE_GRADIENT]) | _graphs(model, answers)
    graphs = {name: made[name] for name in names}
    check(model, module, graphs, weights)
    return Exported(graphs, model.noises, "i8" if model.samples.ids else "f4")


def forward_graph(spec: ModelSpec, module: nn.Module, task: Task = CLASSIFICATION) -> Graph:
    """Return the graph `train` without gradients, in plain operators: it gives loss and statistic:<tensor>.

    Raises:
        ModelError: see `export`.
    """
    graph = _graph(steps.prepare(spec, module, task), TRAIN, plain=True)
    return graph.keeping([name for name in graph.output_names if not name.startswith("gradient:")])


def _graph(model: steps.Model, name: str, *, plain: bool = False) -> Graph:
    return _graphs(model, [name], plain=plain)[name]


def _graphs(model: steps.Model, names: list[str], *, plain: bool = False) -> dict[str, Graph]:
    """Return graphs of one mode, which share the trace of the forward pass."""
    spec = model.spec
    traces = trace(
        spec.name,
        model.module,
        lambda watch: steps.step(model, names, watch),
        lambda num_samples: {name: steps.inputs(model, name, num_samples) for name in names},
        RULES,
    )
    return {name: lower(spec.name, one, plain=plain) for name, one in traces.items()}
