"""Chooses the model to train for a measurement: the model of the last joined run, or a model by name."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fleetune.edge_agent.state.agent_store import AgentStore
from fleetune.edge_agent.state.frozen_tensors import BackboneLacking, frozen_tensors
from fleetune.edge_agent.training.backend import Backend, LabelArray
from fleetune.edge_agent.training.device_data import DeviceData
from fleetune.edge_agent.training.trainers import AUTO, Trainers, make_backend, needs_bundle
from fleetune.protocols.bundle.bundle import read_bundle
from fleetune.protocols.bundle.first_weights import draw_weights
from fleetune.protocols.bundle.shipped import shipped_bundle
from fleetune.protocols.errors import ModelError, PacketError, SettingError, StoreError
from fleetune.protocols.model.spec import RUNNING_STATISTICS, Axis, FlatArray, ModelSpec, Span, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.tasks import CLASSIFICATION
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.wire.payloads import read_enrolment

REFERENCE = "lenet5"
BATCH_SIZE = 16
NUM_SAMPLES = 128
_IMAGES = (3, 32, 32)
_SHAPES = {"har-cnn": (9, 128)}  # built-in models that do not take images
_NUM_CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A model that is ready to be trained.

    Attributes:
        backend: computes the model.
        weights: initial weights, shape (spec.size,).
        settings: the run's [training] section.
        data: synthetic samples in the model's shape.
        flops_per_sample: floating-point operations of one training step per sample.
        where_from: words for the model and its trainer.
    """

    backend: Backend
    weights: FlatArray
    settings: TrainingSection
    data: DeviceData
    flops_per_sample: float
    where_from: str


def choose_workload(
    name: str | None, store: AgentStore | None, threads: int, trainer: str = AUTO
) -> Workload:
    """Return the model called `name`, or else that of the latest run in `store`, or else LeNet-5.

    Args:
        name: see `workload_by_name`.
        store: the device's store.
        threads: processor threads.
        trainer: "auto" or one of `edge_agent.training.trainers.KINDS`.

    Raises:
        ModelError: see `workload_by_name`.
    """
    trainers = Trainers(trainer)
    joined = workload_of_last_run(store, threads, trainers) if name is None and store is not None else None
    return joined or workload_by_name(name or REFERENCE, threads, trainers)


def workload_of_last_run(store: AgentStore, threads: int, trainers: Trainers) -> Workload | None:
    """Return the model of the latest run with a stored enrolment; None if none can be read and built."""
    for run in store.runs():
        try:
            enrolment = read_enrolment(store.enrolment(run).read() or b"")
            data = store.bundle(run)
            if data is None:
                trainers.lacking[run] = f"the bundle of run {run} is not stored here"
            kind = trainers.kind(run)
            if kind == "torch" and ":" in enrolment.spec.name:
                continue  # a user's code is imported only if its owner named it with --trust
            bundle = read_bundle(data or b"", enrolment.spec) if needs_bundle(kind) else None
            frozen = frozen_tensors(store, enrolment)
            learns = enrolment.learns
            backend = make_backend(kind, enrolment.spec, bundle, threads, task=learns, frozen=frozen)
        except (PacketError, StoreError, ModelError, SettingError, BackboneLacking):
            continue
        return Workload(
            backend=backend,
            weights=enrolment.weights,
            settings=enrolment.training,
            data=synthetic_data(enrolment.spec, task=enrolment.learns),
            flops_per_sample=enrolment.flops_per_sample,
            where_from=f"{enrolment.spec.name}, as in run {run}, with {kind}",
        )
    return None


def workload_by_name(name: str, threads: int = 1, trainers: Trainers | None = None) -> Workload:
    """Return a built-in model or the user's own, with batches of 16.

    Its samples are colour images of 32 x 32, unless it is a built-in model that takes none.

    Raises:
        ModelError: there is no such model, it does not take such samples, or the trainer needs a bundle that
            does not exist.
    """
    trainers, shape = trainers or Trainers(), _SHAPES.get(name, _IMAGES)
    bundle = shipped_bundle(name, shape, _NUM_CLASSES)
    if bundle is None:
        trainers.lacking[name] = f"this agent comes without a bundle of model {name!r}"
    kind = trainers.kind(name)
    if kind != "torch" and bundle is not None:
        weights = np.zeros(bundle.spec.size, np.float32)
        if bundle.recipe is not None:
            weights = draw_weights(bundle.recipe, bundle.spec, Key.of("fleetune", "profile"))
        backend, flops = make_backend(kind, bundle.spec, bundle, threads), bundle.flops_per_sample
    else:
        backend, flops = _by_torch(name, shape, threads)
        weights = backend.weights.copy()
    size = " x ".join(map(str, shape))
    return Workload(
        backend=backend,
        weights=weights,
        settings=TrainingSection(batch_size=BATCH_SIZE),
        data=synthetic_data(backend.spec),
        flops_per_sample=flops,
        where_from=f"{name} on samples of {size}, batches of {BATCH_SIZE}, with {kind}",
    )


def _by_torch(name: str, shape: tuple[int, ...], threads: int) -> tuple[Backend, float]:
    import torch

    from fleetune.edge_agent.training.torch_backend import TorchBackend
    from fleetune.protocols.model.architectures import build, training_flops

    torch.set_num_threads(threads)
    with torch.random.fork_rng(devices=[]):
        module = build(name, shape, _NUM_CLASSES)
    flops = training_flops(module, shape)
    return TorchBackend(_spec_of(name, module, shape), module), flops


def synthetic_data(
    spec: ModelSpec, num_samples: int = NUM_SAMPLES, task: Task = CLASSIFICATION
) -> DeviceData:
    """Training samples of zeros and ones in the model's shape. Embeddings can look them up too."""
    draw = Key.of("fleetune", "made-up data").generator()
    x = draw.integers(0, 2, (num_samples, *spec.input_shape)).astype(np.float32)
    wanted = task.target_shape(spec.num_classes, spec.input_shape)
    y: LabelArray = draw.integers(0, spec.num_classes, num_samples)
    if task.kind == "reconstruction":
        y = np.zeros(num_samples, np.int64)
    elif wanted != ():
        y = np.zeros((num_samples, *wanted), np.float32)
    return DeviceData(x, y, x[:0], y[:0], x[:0], y[:0], source="made-up samples")


def _spec_of(name: str, module: Any, shape: tuple[int, ...]) -> ModelSpec:
    """Describe a module as the coordinator does, except for coupled neurons.

    The outputs of each layer but the last form a group of their own, so that a ratio freezes a share of its
    rows.
    """
    parameters = {path: one for path, one in module.named_parameters() if one.requires_grad}
    statistics = {path: one for path, one in module.named_buffers() if _leaf(path) in RUNNING_STATISTICS}
    outputs = {_layer(path): one.shape[0] for path, one in reversed(parameters.items()) if one.ndim}
    inner = list(outputs)[:0:-1]  # in the module's order, without the last layer

    def described(path: str, tensor: Any) -> TensorSpec:
        layer, kind = _layer(path), "bias" if _leaf(path).startswith("bias") else "weight"
        rows: Axis = ()
        if layer in inner and tensor.ndim and tensor.shape[0] == outputs[layer]:
            rows = (Span(inner.index(layer), 0, outputs[layer]),)
        axes = (rows, *((),) * tensor.ndim)[: tensor.ndim]
        return TensorSpec(path, tuple(tensor.shape), "stat" if path in statistics else kind, layer, axes)  # type: ignore[arg-type]

    tensors = tuple(described(path, tensor) for path, tensor in {**parameters, **statistics}.items())
    return ModelSpec(name, tensors, tuple(outputs[layer] for layer in inner), shape, _NUM_CLASSES)


def _layer(path: str) -> str:
    return path.rpartition(".")[0]


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]
