"""Makes the bundle of a model from the model's name."""

import logging

from msgspec import UNSET, UnsetType, structs
from torch import nn

from fleetune.coordinator.export.activation_bytes import activation_bytes
from fleetune.coordinator.export.graphs import export
from fleetune.coordinator.export.ort_training import can_differentiate, training_part
from fleetune.coordinator.export.recipe import recipe_of
from fleetune.coordinator.spec.partial_training import described
from fleetune.coordinator.spec.spec_from_torch import weights_of
from fleetune.protocols.bundle.bundle import MAX_BYTES, Bundle, read_bundle
from fleetune.protocols.errors import ModelError, PacketError
from fleetune.protocols.model.architectures import training_flops
from fleetune.protocols.model.backbone_file import backbone_file, backbone_file_bytes
from fleetune.protocols.model.spec import Backbone, FlatArray, ModelSpec
from fleetune.protocols.model.torch_backbone import frozen_values
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import ModelSection
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.task import Task

log = logging.getLogger(__name__)


def make_bundle(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    key: Key,
    section: TaskSection = TaskSection(),  # noqa: B008 - frozen
) -> Bundle:
    """Make the bundle of a model: trace it, lower it to ONNX, and compare it with torch.

    Args:
        name: the name of a built-in model, or `package.module:function`.
        input_shape: the shape of one sample, without the batch axis.
        num_classes: the number of logits.
        key: the key of the first weights. The bundle holds the weights if they cannot be drawn without torch.
        section: the section [task], whose loss the graphs compute.

    Raises:
        ModelError: the model cannot be built, described or exported.
        SettingError: the task has no such loss or score.
    """
    model = ModelSection(name, input_shape=input_shape, num_classes=num_classes)
    return make_run_model_bundle(model, key, section)


def make_run_model_bundle(
    model: ModelSection,
    key: Key,
    section: TaskSection = TaskSection(),  # noqa: B008 - frozen
) -> Bundle:
    """Make the bundle of a run's model; if [model] freezes a backbone, only the rest trains.

    Args:
        model: the section [model], with input_shape and num_classes.
        key: the key of the first weights.
        section: the section [task], whose loss the graphs compute.

    Raises:
        ModelError: the model cannot be built, described or exported.
        SettingError: the task has no such loss or score, or [model] freezes layers that the model lacks.
    """
    task = task_of(section)
    spec, module = described(model, key)
    name, input_shape, weights = spec.name, spec.input_shape, weights_of(spec, module)
    exported = export(spec, module, weights, task)
    whole = structs.replace(model, trainable=(), adapters=None)
    recipe = recipe_of(*((spec, module) if whole == model else described(whole, key)))
    ort_training = _ort_training(spec, module, weights, task) if can_differentiate() else {}
    made = Bundle(
        spec=spec,
        graphs=exported.graphs,
        noises=exported.noises,
        input_type=exported.input_type,
        flops_per_sample=training_flops(module, input_shape),
        activation_bytes_per_sample=activation_bytes(module, input_shape),
        recipe=recipe,
        weights=None if recipe else weights,
        frozen=UNSET if recipe else _frozen(spec, module),
        ort_training=ort_training,
        task=UNSET if section == TaskSection() else section,
    )
    try:
        # read as devices read it, so that a bundle which they would reject is never sent
        return read_bundle(made.encoded(), spec)
    except PacketError as problem:
        raise ModelError(f"model {name!r} cannot be exported: devices would refuse it: {problem}") from None


def _frozen(spec: ModelSpec, module: nn.Module) -> bytes | UnsetType:
    """Return the encoded backbone for a coordinator without torch; UNSET if it does not fit into a bundle."""
    backbone = spec.backbone
    if not isinstance(backbone, Backbone) or backbone_file_bytes(backbone) > MAX_BYTES // 2:
        return UNSET
    return backbone_file(backbone, frozen_values(spec, module))


def _ort_training(spec: ModelSpec, module: nn.Module, weights: FlatArray, task: Task) -> dict[str, bytes]:
    """Return the bundle's files for onnxruntime-training; empty if they cannot be made.

    A failure is only logged, because agents with torch or ONNX Runtime do not need these files.
    """
    try:
        return training_part(spec, module, weights, task)
    except ModelError as problem:
        log.warning(
            "the bundle works with torch and ONNX Runtime, not with onnxruntime-training: %s",
            problem,
        )
        return {}
