"""Finds a run's model: a bundle file, a model that comes with Fleetune, or one built by torch.

A coordinator without torch can run any model that was exported elsewhere.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from msgspec import UNSET, structs
from numpy.typing import NDArray

from fleetune.protocols.bundle.bundle import Bundle, read_bundle
from fleetune.protocols.bundle.first_weights import (
    draw_adapters,
    draw_convolutions,
    draw_frozen,
    draw_weights,
)
from fleetune.protocols.bundle.shipped import shipped_bundle
from fleetune.protocols.errors import ModelError, PacketError, SettingError
from fleetune.protocols.input_files import read_input
from fleetune.protocols.model.backbone_file import Tensors, read_backbone
from fleetune.protocols.model.input_scaling import check_channels
from fleetune.protocols.model.spec import Backbone, FlatArray, ModelSpec
from fleetune.protocols.settings.device import DataSection, ModelSection
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.tasks import task_of
from fleetune.protocols.user_code import running_model
from fleetune.protocols.wire.payloads import run_key

FROM_FILE = "bundle:"


@dataclass(frozen=True)
class Model:
    """A run's model and its initial weights.

    Attributes:
        spec: description of the model.
        weights: initial weights, shape (spec.size,).
        flops_per_sample, activation_bytes_per_sample: see `protocols.wire.payloads.Enrolment`.
        bundle: bundle for devices without torch; None if not made yet.
        frozen: the tensors of its backbone; empty: it has none, or they are not known here.
        buffers: buffers that the model's code makes, so no device receives them; empty if not known here.
        tied: further names of tied tensors, with the first name of each; empty if not known here.
    """

    spec: ModelSpec
    weights: FlatArray
    flops_per_sample: float
    activation_bytes_per_sample: float
    bundle: Bundle | None
    frozen: Tensors = field(default_factory=dict)
    buffers: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)


def find_model(settings: RunSettings) -> Model:
    """Find the model of a run. Torch is imported only if no bundle of the model is available.

    Raises:
        SettingError: the model's shape is unknown, or differs from the bundle's.
        ModelError: the model cannot be built or described, or its bundle is missing or damaged.
    """
    model, key = _found(settings), run_key(settings.run.seed).child("weights")
    if settings.model.init != "default":
        _check_init(model, settings)
        model = replace(model, weights=draw_convolutions(model.weights, model.spec, key))
    return replace(model, weights=draw_adapters(model.weights, model.spec, key))


def _check_init(model: Model, settings: RunSettings) -> None:
    """Raise SettingError if `model.init` has no effect on this model."""
    init, convolutions = settings.model.init, [t for t in model.spec.tensors if len(t.shape) > 2]
    if settings.model.weights is not None:
        raise SettingError(f"model.init: {init!r} draws weights and model.weights brings them; leave one out")
    if isinstance(model.spec.backbone, Backbone):
        raise SettingError(f"model.init: {init!r} draws what trains, and here a part is frozen; leave it out")
    if model.bundle is not None and model.bundle.recipe is None:
        raise SettingError(f"model.init: the bundle brings its own weights; leave init = {init!r} out")
    if not convolutions:
        raise SettingError(f"model.init: {model.spec.name!r} has no convolutions that {init!r} could draw")


def _found(settings: RunSettings) -> Model:
    bundle = _bundle_at_hand(settings)
    if bundle is None:
        return _by_torch(settings)
    bundle = for_run(bundle, settings)
    return Model(
        bundle.spec,
        _first_weights(bundle, settings),
        bundle.flops_per_sample,
        bundle.activation_bytes_per_sample,
        bundle,
        _first_frozen(bundle, settings),
    )


def is_at_hand(settings: RunSettings) -> bool:
    """True if the model can be loaded without torch. Raises as `find_model`."""
    return _bundle_at_hand(settings) is not None


def make_run_bundle(settings: RunSettings) -> Bundle:
    """Make the bundle of a run's model with torch.

    Raises:
        ModelError: the model cannot be exported, or torch is not installed.
    """
    model = _shaped(settings)
    try:
        from fleetune.coordinator.export.make_bundle import make_run_model_bundle
    except ImportError:
        raise _no_torch(model.name) from None
    key = run_key(settings.run.seed).child("weights")
    return for_run(make_run_model_bundle(model, key, settings.task), settings)


def for_run(bundle: Bundle, settings: RunSettings) -> Bundle:
    """Return a copy of the bundle with the run's [data] settings of samples and classes."""
    data = settings.data
    _check_names(data.class_names, bundle.spec.num_classes)
    check_channels(data.mean, data.std, bundle.spec.input_shape)
    _check_scale(settings, bundle.spec, ids=bundle.vocabulary is not None)
    return replace(bundle, mean=data.mean, std=data.std, class_names=data.class_names or bundle.class_names)


def _check_names(names: tuple[str, ...], num_classes: int) -> None:
    if names and len(names) != num_classes:
        raise SettingError(f"data.class_names has {len(names)} names; the model has {num_classes} classes")


def _check_scale(settings: RunSettings, spec: ModelSpec, *, ids: bool) -> None:
    plain = DataSection()
    takes = "several inputs" if spec.reads.inputs else "token ids" if ids else ""
    for key in ("mean", "std"):
        if takes and getattr(settings.data, key) != getattr(plain, key):
            raise SettingError(f"data.{key}: model {settings.model.name!r} takes {takes}; leave it out")


def _bundle_at_hand(settings: RunSettings) -> Bundle | None:
    name = settings.model.name
    if name.startswith(FROM_FILE):
        bundle = read_bundle_file(Path(name.removeprefix(FROM_FILE)))
        _check_shape(bundle.spec, settings)
        if (TaskSection() if bundle.task is UNSET else bundle.task) != settings.task:
            raise SettingError(
                "task: the bundle of model.name was exported for another; export it with this run"
            )
        return bundle
    if settings.model.trainable or settings.model.adapters is not None:
        return None  # shipped models have no frozen part
    return shipped_bundle(*_shape(settings)) if settings.task == TaskSection() else None


def read_bundle_file(path: Path) -> Bundle:
    """Read a model bundle from a file.

    Raises:
        ModelError: the file is missing or damaged, or holds no bundle.
    """
    try:
        return read_bundle(read_input(path, error=lambda line: ModelError(f"cannot read bundle {line}")))
    except PacketError as problem:
        raise ModelError(
            f"{path} is no bundle, or damaged ({problem}); edge-coordinator export makes one"
        ) from None


def _check_shape(spec: ModelSpec, settings: RunSettings) -> None:
    model = settings.model
    if model.trainable or model.adapters is not None:
        raise SettingError(
            "model.trainable, model.adapters: the bundle of model.name already fixes what trains; leave them"
            " out, or export the bundle with them"
        )
    wanted = model.input_shape or spec.input_shape, model.num_classes or spec.num_classes
    if wanted != (spec.input_shape, spec.num_classes):
        raise SettingError(
            f"model.name: the bundle is for input {spec.input_shape} and {spec.num_classes} classes, the run"
            f" wants {wanted[0]} and {wanted[1]}; export it for these"
        )


def _shape(settings: RunSettings) -> tuple[str, tuple[int, ...], int]:
    model, num_outputs = settings.model, settings.model.num_classes
    if num_outputs is None and model.input_shape is not None and task_of(settings.task).targets_are_samples:
        num_outputs = math.prod(model.input_shape)
    if model.input_shape is None or num_outputs is None:
        raise SettingError(
            "model.input_shape and model.num_classes are missing: a coordinator has no data to read them "
            "from, e.g. input_shape = [1, 28, 28] and num_classes = 10"
        )
    return model.name, model.input_shape, num_outputs


def _first_weights(bundle: Bundle, settings: RunSettings) -> FlatArray:
    if bundle.recipe is not None:
        return draw_weights(bundle.recipe, bundle.spec, run_key(settings.run.seed).child("weights"))
    assert bundle.weights is not None, "a bundle without a recipe has its weights"
    return bundle.weights


def _first_frozen(bundle: Bundle, settings: RunSettings) -> Tensors:
    if isinstance(bundle.frozen, bytes) and isinstance(bundle.spec.backbone, Backbone):
        return read_backbone(bundle.frozen, bundle.spec.backbone)
    if bundle.recipe is None:
        return {}
    return draw_frozen(bundle.recipe, bundle.spec, run_key(settings.run.seed).child("weights"))


def _by_torch(settings: RunSettings) -> Model:
    model = _shaped(settings)
    name, input_shape, num_classes = _shape(settings)
    _check_names(settings.data.class_names, num_classes)
    try:
        from fleetune.coordinator.export.activation_bytes import activation_bytes
        from fleetune.coordinator.spec.partial_training import described
        from fleetune.coordinator.spec.spec_from_torch import built_buffers, tied_names, weights_of
        from fleetune.protocols.model.architectures import training_flops
        from fleetune.protocols.model.token_ids import samples_of
        from fleetune.protocols.model.torch_backbone import frozen_values
    except ImportError:
        raise _no_torch(name) from None
    spec, module = described(model, run_key(settings.run.seed).child("weights"))
    weights, frozen = weights_of(spec, module), frozen_values(spec, module)
    _check_scale(settings, spec, ids=samples_of(module, input_shape).ids)
    with running_model(name, "cannot be trained"):
        flops, activations = training_flops(module, input_shape), activation_bytes(module, input_shape)
    buffers, tied = built_buffers(spec, module), tied_names(module)
    return Model(spec, weights, flops, activations, None, frozen, buffers, tied)


def _shaped(settings: RunSettings) -> ModelSection:
    """Return the [model] section with a known shape.

    Raises:
        SettingError: the shape is unknown.
    """
    _, input_shape, num_classes = _shape(settings)
    return structs.replace(settings.model, input_shape=input_shape, num_classes=num_classes)


def _no_torch(name: str) -> ModelError:
    return ModelError(
        f"model {name!r} is built by torch, which is not installed here: pip install torch, or"
        f' export it elsewhere (edge-coordinator export) and give model.name = "{FROM_FILE}FILE"'
    )
