"""A model for devices without torch: what it computes and what must be known around it, in a few kB.

The coordinator makes it once (`coordinator.export`); a device trains with it
(`edge_agent.training.onnx_backend`) and writes its personal model from it. The digest of its bytes names it:
equal names, equal content.

Graphs (see `protocols.bundle.graph`), all with an input for each tensor of the spec and of its backbone, by
its name, and `x`:
    train               y, noise:<k> in; loss, gradient:<tensor>, statistic:<tensor> (its new value) out;
                        batches in (steps since the weights were loaded) where a norm has no momentum
    evaluate-gradient   y in; loss, gradient:<tensor> of the model as it evaluates out
    answer              logits out, and features (what the last layer gets) where the model has them
    train+distillation  as train, and the term of that name (`protocols.model.loss_terms`);
                        teacher, strength, temperature in
    train+contrast      likewise; near, far, strength, temperature in
    losses              y in; losses out, one a sample, as the model evaluates: where the loss is a user's
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from fleetune.protocols.bounds import MOST_CLASSES, MOST_IDS, Amount, Finite, Label, Share
from fleetune.protocols.bundle.graph import BATCH, Graph
from fleetune.protocols.bundle.graph_cost import GraphCost, cost_of
from fleetune.protocols.errors import PacketCorrupt, PacketForeign, SettingError
from fleetune.protocols.model.backbone_file import read_backbone
from fleetune.protocols.model.input_scaling import Mean, Std, check_channels
from fleetune.protocols.model.spec import (
    MAX_TENSORS,
    Backbone,
    FlatArray,
    ModelSpec,
    Shape,
)
from fleetune.protocols.model.spec_check import check_spec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import CLASSIFICATION, task_of
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.update import codec

MAX_BYTES = 2**28  # also when unpacked
_KEEPING_IDS = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
MAX_ELEMENTS = 400_000  # resnet8 has 40,000
SLACK = 10
MOST_OPERATIONS = 10**13
PROBE = 3  # samples of the run that is priced when a bundle is read
MAX_GRAPHS, MAX_NOISES = 16, 1000

TRAIN, EVALUATE_GRADIENT, ANSWER = "train", "evaluate-gradient", "answer"
DISTILLATION, CONTRAST, LOSSES = "train+distillation", "train+contrast", "losses"
_RESULTS = {ANSWER: {"logits"}, LOSSES: {"losses"}}
REQUIRED = (TRAIN, EVALUATE_GRADIENT, ANSWER)


@dataclass(frozen=True)
class Noise:
    """What a dropout layer multiplies its input by: 0 with chance `p`, else 1 / (1 - p).

    Attributes:
        shape: of one sample's factors.
        p: chance of 0.
    """

    shape: Shape
    p: Share

    def draw(self, key: Key, index: int, num_samples: int) -> NDArray[np.float32]:
        """Factors of the model's dropout number `index`, shape (num_samples, *shape); the same on every
        device and with every backend for the same `key`.
        """
        shape = (num_samples, *self.shape)
        kept = key.child("dropout", index).uniform(int(np.prod(shape))) >= self.p
        scale = np.float32(0.0 if self.p >= 1 else 1 / (1 - self.p))
        return (kept * scale).astype(np.float32).reshape(shape)


@dataclass(frozen=True)
class Uniform:
    """A tensor drawn from [-bound, bound)."""

    tensor: Label
    bound: Finite


@dataclass(frozen=True)
class Recipe:
    """How a model's first weights are drawn, see `protocols.bundle.first_weights`.

    Attributes:
        draws: in this order.
        constants: what each of the other tensors is filled with.
    """

    draws: Annotated[tuple[Uniform, ...], Meta(max_length=MAX_TENSORS)]
    constants: Annotated[dict[Label, Finite], Meta(max_length=MAX_TENSORS)]


@dataclass(frozen=True)
class Bundle:
    """A model for devices without torch.

    Attributes:
        spec: the model.
        graphs: by name, see above.
        noises: of the dropout layers of `train`, in the order of its inputs noise:0, noise:1, ...
        input_type: what `x` is.
        mean, std: samples are (raw - mean) / std; a list has one number for each channel.
        class_names: of the labels, in their order; empty: they have none.
        flops_per_sample, activation_bytes_per_sample: see `protocols.wire.payloads.Enrolment`.
        recipe: of the first weights; None: they cannot be drawn without torch.
        weights: instead of a recipe, for a coordinator without torch; shape (spec.size,).
        frozen: likewise the file of the model's backbone (`protocols.model.backbone_file`), as float32; only
            in a bundle's file, because devices get the run's backbone by itself.
        ort_training: files for onnxruntime-training, by name; empty: made without it.
        task: whose loss the graphs compute; left out: that of classification.
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
        """What its graphs train. Raises SettingError: the task has no such loss or score."""
        return CLASSIFICATION if self.task is UNSET else task_of(self.task)

    def most(self, num_samples: int) -> GraphCost:
        """The most that a run of one graph may take, by what is said of the model. Honest ones come to 1.2
        times the operations and 1.3 times the bytes that are said.
        """
        frozen = 4 * sum(tensor.size for tensor in self.spec.frozen)
        held = num_samples * self.activation_bytes_per_sample + 8 * 4 * self.spec.size + frozen
        operations = SLACK * num_samples * self.flops_per_sample + 10**9
        return GraphCost(int(min(MOST_OPERATIONS, operations)), int(SLACK * held) + 2**26)

    @property
    def vocabulary(self) -> int | None:
        """Samples are token ids, whole numbers from 0 and below this; None: they are numbers."""
        return min(_rows_by_id(self.graphs[ANSWER]), default=MOST_IDS) if self.input_type == "i8" else None

    def for_devices(self, spec: ModelSpec) -> "Bundle":
        """The same for a run's devices: of the backbone that the run's spec names, which is known only when a
        run begins, and without its values.

        Raises:
            PacketForeign: the run has no backbone, and this has one.
        """
        own, named = self.spec.backbone, spec.backbone
        if isinstance(own, Backbone) and own.tensors and not isinstance(named, Backbone):
            raise PacketForeign(
                f"the bundle of model {self.spec.name!r} takes {own.tensors[0].name} as a frozen tensor,"
                " which this run does not send: it is the bundle of another model; begin a new run"
            )
        if not isinstance(own, Backbone) or not isinstance(named, Backbone):
            return self
        known = replace(own, digest=named.digest, weights=named.weights)
        return replace(self, spec=replace(self.spec, backbone=known), frozen=UNSET)

    def check_is_of(self, spec: ModelSpec) -> None:
        """Raises PacketForeign: it is of another model."""
        if self.spec.hash != spec.hash:
            raise PacketForeign(
                f"bundle of model {self.spec.hash}; the fleet's model is {spec.hash} ({spec.name})"
            )

    def encoded(self) -> bytes:
        """Equal bundles give equal bytes."""
        return codec.encode(self, self.spec)


def read_bundle(data: bytes, spec: ModelSpec | None = None) -> Bundle:
    """Read a bundle back and check all of it.

    Args:
        data: what `Bundle.encoded` made.
        spec: the model it has to be of; None: any.

    Raises:
        PacketError: damaged, of another model, or of a format that is not read here.
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


def _check_frozen(bundle: Bundle) -> None:
    if not isinstance(bundle.frozen, UnsetType):
        if not isinstance(bundle.spec.backbone, Backbone):
            raise PacketCorrupt(f"bundle of model {bundle.spec.name}: it has no backbone, but values of one")
        read_backbone(bundle.frozen, bundle.spec.backbone)


def _check_ports(bundle: Bundle) -> None:
    """What a trainer feeds and reads is there, in the spec's shapes."""
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
    """They are drawn as they are said to be, so a graph must take them as such."""
    ports = {port.name: port for port in bundle.graphs[TRAIN].inputs}
    for index, noise in enumerate(bundle.noises):
        port = ports.get(f"noise:{index}")
        if port is None or port.shape != (BATCH, *noise.shape):
            raise PacketCorrupt(f"bundle: graph {TRAIN} takes no noise:{index} of shape {noise.shape}")


def _check_recipe(bundle: Bundle) -> None:
    if bundle.recipe is not None:
        known = {tensor.name for tensor in bundle.spec.tensors}
        known |= {tensor.name for tensor in bundle.spec.frozen}
        named = {draw.tensor for draw in bundle.recipe.draws} | set(bundle.recipe.constants)
        if not named <= known:
            raise PacketCorrupt(f"bundle: the recipe fills {min(named - known)!r}, which is no tensor")


def _rows_by_id(graph: Graph) -> Iterator[int]:
    """Of every table whose rows a graph takes by the samples, how many it has."""
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
