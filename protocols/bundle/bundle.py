"""A bundle: a model for devices without torch, in a few kB, with its graphs and all data that training needs.

The coordinator makes it once (`coordinator.export`). A device trains with it
(`edge_agent.training.onnx_backend`) and exports its personal model from it. A digest of the bytes names a
bundle, so equal names mean equal content.

Every graph (see `protocols.bundle.graph`) has the input `x` and an input for each tensor of the spec and of
its backbone, by the tensor's name. The graphs, with their further inputs and outputs:
    train               inputs y, noise:<k>; batches (steps since the weights were loaded) where a norm has no
                        momentum. outputs loss, gradient:<tensor>, statistic:<tensor> (its new value)
    evaluate-gradient   input y. outputs loss, gradient:<tensor>, of the model in evaluation mode
    answer              outputs logits, and features (the input of the last layer) where the model has them
    train+distillation  as train, with the loss term of that name (`protocols.model.loss_terms`);
                        inputs teacher, strength, temperature
    train+contrast      likewise; inputs near, far, strength, temperature
    losses              input y. output losses, one a sample, in evaluation mode; for a user's loss function
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from msgspec import UNSET, Meta, UnsetType

from fleetune.protocols.bounds import MOST_CLASSES, MOST_IDS, Amount, Finite, Label
from fleetune.protocols.bundle.graph import Graph
from fleetune.protocols.bundle.graph_cost import GraphCost, cost_of
from fleetune.protocols.errors import PacketCorrupt, PacketForeign, SettingError
from fleetune.protocols.model.backbone_file import read_backbone
from fleetune.protocols.model.input_scaling import Mean, Std, check_channels
from fleetune.protocols.model.noise import Noise
from fleetune.protocols.model.spec import (
    MAX_TENSORS,
    Backbone,
    FlatArray,
    ModelSpec,
)
from fleetune.protocols.model.spec_check import check_spec
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import CLASSIFICATION, task_of
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.update import codec

MAX_BYTES = 2**28  # limit for the unpacked bytes, too
_KEEPING_IDS = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
MAX_ELEMENTS = 400_000  # resnet8 has 40,000
SLACK = 10
MOST_OPERATIONS = 10**13
PROBE = 3  # samples in the run whose cost is computed when a bundle is read
MAX_GRAPHS, MAX_NOISES = 16, 1000

TRAIN, EVALUATE_GRADIENT, ANSWER = "train", "evaluate-gradient", "answer"
DISTILLATION, CONTRAST, LOSSES = "train+distillation", "train+contrast", "losses"
_RESULTS = {ANSWER: {"logits"}, LOSSES: {"losses"}}
REQUIRED = (TRAIN, EVALUATE_GRADIENT, ANSWER)


@dataclass(frozen=True)
class Uniform:
    """A tensor drawn uniformly from [-bound, bound)."""

    tensor: Label
    bound: Finite


@dataclass(frozen=True)
class Recipe:
    """How to draw a model's first weights, see `protocols.bundle.first_weights`.

    Attributes:
        draws: the drawn tensors, in the order of drawing.
        constants: the value that fills each other tensor.
    """

    draws: Annotated[tuple[Uniform, ...], Meta(max_length=MAX_TENSORS)]
    constants: Annotated[dict[Label, Finite], Meta(max_length=MAX_TENSORS)]


@dataclass(frozen=True)
class Bundle:
    """A model for devices without torch.

    Attributes:
        spec: the model.
        graphs: the graphs by name, see the top of this file.
        noises: the random numbers that `train` takes, in the order of its inputs noise:0, noise:1, ...
        input_type: element type of `x`.
        mean, std: input scaling: the model gets (raw - mean) / std; a list has one number for each channel.
        class_names: names of the labels in their order; empty if they have none.
        flops_per_sample, activation_bytes_per_sample: see `protocols.wire.payloads.Enrolment`.
        recipe: how the first weights are drawn; None: only torch can draw them.
        weights: first weights in place of a recipe, for a coordinator without torch; shape (spec.size,).
        frozen: file of the backbone (`protocols.model.backbone_file`) as float32, for the same case. It is
            only in a bundle's file: devices receive the run's backbone separately.
        ort_training: files for onnxruntime-training by name; empty if the bundle was made without it.
        task: the task whose loss the graphs compute; left out for classification.
    """

    spec: ModelSpec
    graphs: Annotated[dict[Label, Graph], Meta(max_length=MAX_GRAPHS)]
    noises: Annotated[tuple[Noise, ...], Meta(max_length=MAX_NOISES)] = ()
    input_type: Literal["f4", "i8"] = "f4"
    mean: Mean = 0.0
    std: Std = 1.0
    class_names: Annotated[tuple[Label, ...], Meta(max_length=MOST_CLASSES)] = ()
    flops_per_sample: Amount = 0.0
    activation_bytes_per_sample: Amount = 0.0
    recipe: Recipe | None = None
    weights: FlatArray | None = None
    frozen: bytes | UnsetType = UNSET
    ort_training: Annotated[dict[Label, bytes], Meta(max_length=4)] = field(default_factory=dict)
    task: TaskSection | UnsetType = UNSET

    @property
    def learns(self) -> Task:
        """Return the task that the graphs train. Raises SettingError if it has no such loss or score."""
        return CLASSIFICATION if self.task is UNSET else task_of(self.task)

    def most(self, num_samples: int) -> GraphCost:
        """Return the upper limit on the cost of running one graph, computed from figures in the bundle.

        Exported models reach 1.2 times the stated operations and 1.3 times the stated bytes; the limit leaves
        a factor of SLACK.
        """
        frozen = 4 * sum(tensor.size for tensor in self.spec.frozen)
        held = num_samples * self.activation_bytes_per_sample + 8 * 4 * self.spec.size + frozen
        operations = SLACK * num_samples * self.flops_per_sample + 10**9
        return GraphCost(int(min(MOST_OPERATIONS, operations)), int(SLACK * held) + 2**26)

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids, if samples are token ids from 0; None if samples are real numbers."""
        return min(_rows_by_id(self.graphs[ANSWER]), default=MOST_IDS) if self.input_type == "i8" else None

    def for_devices(self, spec: ModelSpec) -> "Bundle":
        """Return the bundle for a run's devices: it names the run's backbone, but leaves out its values.

        The backbone is known only when a run begins. The groups of neurons are those of the run: another
        version of Fleetune may have found others.

        Raises:
            PacketForeign: the bundle needs a backbone and the run has none.
        """
        own, named = self.spec.backbone, spec.backbone
        if isinstance(own, Backbone) and own.tensors and not isinstance(named, Backbone):
            raise PacketForeign(
                f"the bundle of model {self.spec.name!r} takes {own.tensors[0].name} as a frozen tensor,"
                " which this run does not send: it is the bundle of another model; begin a new run"
            )
        known = replace(self, spec=_with_groups_of(self.spec, spec))
        if not isinstance(own, Backbone) or not isinstance(named, Backbone):
            return known
        backbone = replace(own, digest=named.digest, weights=named.weights)
        return replace(known, spec=replace(known.spec, backbone=backbone), frozen=UNSET)

    def check_is_of(self, spec: ModelSpec) -> None:
        """Raise PacketForeign if the bundle belongs to another model."""
        if self.spec.hash != spec.hash:
            raise PacketForeign(
                f"bundle of model {self.spec.hash}; the fleet's model is {spec.hash} ({spec.name})"
            )

    def encoded(self) -> bytes:
        """Return the bytes of the bundle; equal bundles give equal bytes."""
        return codec.encode(self, self.spec)


def read_bundle(data: bytes, spec: ModelSpec | None = None) -> Bundle:
    """Read a bundle and check every part of it.

    Args:
        data: bytes from `Bundle.encoded`.
        spec: the model that the bundle must belong to; None: any model.

    Raises:
        PacketError: the bundle is corrupt, belongs to another model, or has an unknown format.
    """
    bundle = codec.decode(data, Bundle, None, limit=MAX_BYTES, elements=MAX_ELEMENTS)
    check_spec(bundle.spec)
    codec.check_model(data, bundle.spec)
    if spec is not None:
        bundle.check_is_of(spec)
    try:
        learns = bundle.learns
    except SettingError as problem:
        raise PacketCorrupt(f"bundle of model {bundle.spec.name}: {problem}") from None
    if missing := [name for name in (*REQUIRED, *[LOSSES] * learns.users_loss) if name not in bundle.graphs]:
        raise PacketCorrupt(f"bundle of model {bundle.spec.name}: graph {missing[0]!r} is missing")
    for graph in bundle.graphs.values():
        graph.check()
    _check_ports(bundle)
    try:
        check_channels(bundle.mean, bundle.std, bundle.spec.input_shape)
    except SettingError as problem:
        raise PacketCorrupt(f"bundle of model {bundle.spec.name}: {problem}") from None
    _check_noises(bundle)
    _check_recipe(bundle)
    for name, graph in bundle.graphs.items():
        cost_of(name, graph, PROBE).check(name, bundle.most(PROBE))
    _check_frozen(bundle)
    weights = bundle.weights
    if weights is not None and (weights.shape != (bundle.spec.size,) or weights.dtype != np.float32):
        raise PacketCorrupt(f"bundle of model {bundle.spec.name}: its weights do not fit")
    return bundle


def _with_groups_of(spec: ModelSpec, other: ModelSpec) -> ModelSpec:
    """Return a spec with the groups of another spec of the same tensors; unchanged if the tensors differ."""
    if [(one.name, one.shape) for one in spec.tensors] != [(one.name, one.shape) for one in other.tensors]:
        return spec
    pairs = zip(spec.tensors, other.tensors, strict=True)
    return replace(
        spec, tensors=tuple(replace(one, axes=its.axes) for one, its in pairs), groups=other.groups
    )


def _check_frozen(bundle: Bundle) -> None:
    if not isinstance(bundle.frozen, UnsetType):
        if not isinstance(bundle.spec.backbone, Backbone):
            raise PacketCorrupt(f"bundle of model {bundle.spec.name}: it has no backbone, but values of one")
        read_backbone(bundle.frozen, bundle.spec.backbone)


def _check_ports(bundle: Bundle) -> None:
    """Check that each graph has the inputs and outputs that a trainer uses, in the spec's shapes."""
    spec = bundle.spec
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    shapes |= {tensor.name: tensor.shape for tensor in spec.frozen}
    for name, graph in bundle.graphs.items():
        for port in graph.inputs:
            if port.name in shapes and port.shape != shapes[port.name]:
                raise PacketCorrupt(
                    f"bundle: {name} takes {port.name} as {port.shape}, not {shapes[port.name]}"
                )
        needed = _RESULTS.get(name) or {"loss", *_gradients(bundle.spec)}
        if absent := needed - set(graph.output_names):
            raise PacketCorrupt(f"bundle: {name} does not give {min(absent)}")


def _check_noises(bundle: Bundle) -> None:
    """Check that graph `train` has an input for each noise, in the shape in which it is drawn."""
    ports = {port.name: port for port in bundle.graphs[TRAIN].inputs}
    for index, noise in enumerate(bundle.noises):
        port = ports.get(f"noise:{index}")
        if port is None or port.shape != noise.shape:
            raise PacketCorrupt(f"bundle: graph {TRAIN} takes no noise:{index} of shape {noise.shape}")


def _check_recipe(bundle: Bundle) -> None:
    if bundle.recipe is not None:
        known = {tensor.name for tensor in bundle.spec.tensors}
        known |= {tensor.name for tensor in bundle.spec.frozen}
        named = {draw.tensor for draw in bundle.recipe.draws} | set(bundle.recipe.constants)
        if not named <= known:
            raise PacketCorrupt(f"bundle: the recipe fills {min(named - known)!r}, which is no tensor")


def _rows_by_id(graph: Graph) -> Iterator[int]:
    """Yield the number of rows of each table in which the graph looks up the samples as ids."""
    tables = {port.name: port.shape for port in graph.inputs}
    ids = {"x"}
    for node in graph.nodes:
        if node.op in _KEEPING_IDS and node.inputs[0] in ids:
            ids.update(node.outputs)
        elif node.op == "Gather" and node.inputs[1] in ids and not node.attributes.get("axis"):
            rows = next(iter(tables.get(node.inputs[0], ())), None)
            if isinstance(rows, int):
                yield rows


def _gradients(spec: ModelSpec) -> set[str]:
    return {f"gradient:{tensor.name}" for tensor in spec.tensors if tensor.kind != "stat"}
