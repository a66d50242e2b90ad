"""A model's training graphs, each compared with torch before anyone gets it."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from fleetune.coordinator.export import steps
from fleetune.coordinator.export.onnx_lowering import lower
from fleetune.coordinator.export.torch_comparison import check
from fleetune.coordinator.export.torch_trace import trace
from fleetune.protocols.bundle.bundle import (
    ANSWER,
    CONTRAST,
    DISTILLATION,
    EVALUATE_GRADIENT,
    LOSSES,
    TRAIN,
    Noise,
)
from fleetune.protocols.bundle.graph import Graph
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.tasks import CLASSIFICATION
from fleetune.protocols.tasks.task import Task


@dataclass(frozen=True)
class Exported:
    """What `protocols.bundle.bundle.Bundle` has under the same names."""

    graphs: dict[str, Graph]
    noises: tuple[Noise, ...]
    input_type: Literal["f4", "i8"]


def export(spec: ModelSpec, module: nn.Module, weights: FlatArray, task: Task = CLASSIFICATION) -> Exported:
    """The graphs of a model.

    Args:
        spec: its description.
        module: left as it is.
        weights: to compare with torch at, shape (spec.size,).
        task: whose loss they compute.

    Raises:
        ModelError: an operator that has no ONNX form, a use of the batch size that has none, a graph that
            differs from torch, or ONNX Runtime is missing.
    """
    model = steps.prepare(spec, module, task)
    names = [TRAIN, EVALUATE_GRADIENT, ANSWER]
    names += [DISTILLATION] if task.kind == "classification" else []
    names += [] if model.num_features is None else [CONTRAST]
    names += [LOSSES] if task.users_loss else []
    graphs = {name: _graph(model, name) for name in names}
    check(model, module, graphs, weights)
    return Exported(graphs, model.noises, "i8" if model.samples.ids else "f4")


def forward_graph(spec: ModelSpec, module: nn.Module, task: Task = CLASSIFICATION) -> Graph:
    """The graph `train` without gradients, in plain operators: loss and statistic:<tensor>.

    Raises:
        ModelError: as `export` does.
    """
    graph = _graph(steps.prepare(spec, module, task), TRAIN, plain=True)
    return graph.keeping([name for name in graph.output_names if not name.startswith("gradient:")])


def _graph(model: steps.Model, name: str, *, plain: bool = False) -> Graph:
    spec = model.spec
    traced = trace(
        spec.name,
        model.module,
        lambda watch: steps.step(model, name, watch),
        lambda num_samples: steps.inputs(model, name, num_samples),
    )
    return lower(spec.name, traced, plain=plain)
