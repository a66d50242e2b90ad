"""Initial weights of a run from `model.weights`: another run's shared model, or a file of weights.

Running statistics are taken from the source if it has them; otherwise they keep the model's initial values.
The source must contain all frozen tensors. A trainable tensor that is missing, or has another shape, keeps
its random initial values, e.g. a new head or adapters.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.run.models import Model
from fleetune.coordinator.run.stored_run import Run, look_at
from fleetune.coordinator.run.weights_file import read_weights
from fleetune.coordinator.store.stored_backbone import stored_backbone
from fleetune.protocols.errors import ModelError, SettingError
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.carried_layers import carry_over
from fleetune.protocols.model.spec import Backbone, FlatArray, FrozenTensor, ModelSpec, TensorSpec
from fleetune.protocols.settings.run_settings import RunSettings

log = logging.getLogger(__name__)

FROM_RUN = "run:"


@dataclass(frozen=True)
class Start:
    """Initial weights of a run.

    Attributes:
        weights: shape (spec.size,).
        continues: id of the run that they come from; None if they come from no run.
        frozen: tensors of the model's backbone; empty if it has none.
    """

    weights: FlatArray
    continues: str | None = None
    frozen: Tensors = field(default_factory=dict)


def run_named(settings: RunSettings) -> str | None:
    """Return the name of the run from whose shared model this run starts; None if there is none."""
    named = settings.model.weights or ""
    return named.removeprefix(FROM_RUN) if named.startswith(FROM_RUN) else None


def start_of(settings: RunSettings, model: Model, runs: Path) -> Start:
    """Return the weights that the run's devices receive first.

    Args:
        settings: settings of the run.
        model: the model with its own initial weights.
        runs: the folder of other runs.

    Raises:
        SettingError: the named run does not exist.
        ModelError: the file does not exist, a tensor does not fit the model (it is named), or the frozen
            tensors are not known.
    """
    if settings.model.weights is None:
        if isinstance(model.spec.backbone, Backbone) and not model.frozen:
            raise ModelError(
                f"model {model.spec.name!r} is frozen in part, and its bundle does not hold that part: name a"
                " safetensors file in model.weights"
            )
        return Start(model.weights, None, model.frozen)
    name = run_named(settings)
    if name is not None:
        if name == settings.run.name:
            raise SettingError(f"model.weights: run {name} cannot start from itself")
        return _from_run(name, model, runs)
    path = Path(settings.model.weights)
    return _start(_without_built(read_weights(path), model, str(path)), model, str(path))


def _from_run(name: str, model: Model, runs: Path) -> Start:
    if Path(name).name != name:
        raise SettingError(f"model.weights: {name!r} is no name of a run in {runs}")
    try:
        with look_at(runs / name) as run:
            return _start(_carried(run, model, name), model, f"run {name}", run.enrolment.run)
    except SettingError as problem:
        raise SettingError(f"model.weights: {problem}") from None


def _carried(run: Run, model: Model, name: str) -> Mapping[str, NDArray[Any]]:
    """Return the initial tensors of a model that continues another run, frozen tensors included.

    If the models differ, they are the layers that both models share, and the new model's own layers for the
    rest.

    Raises:
        ModelError: the models share no layer.
    """
    before, weights = run.enrolment.spec, run.controller.shared_model
    if before.frozen or model.spec.frozen:
        own = {tensor.name: view for tensor, view in before.views(weights)}
        return {**own, **stored_backbone(run.folder, before)}
    if before.hash != model.spec.hash:
        found = carry_over(before, weights, model.spec, model.weights)
        if not found.layers:
            raise ModelError(
                f"model.weights: run {name} has no layer that {model.spec.name} has, by name and shapes"
            )
        if found.new or found.gone:
            log.warning("another model than that of run %s: %s", name, found.words)
            before, weights = model.spec, found.weights
    return {tensor.name: view for tensor, view in before.views(weights)}


def _without_built(
    tensors: Mapping[str, NDArray[Any]], model: Model, source: str
) -> Mapping[str, NDArray[Any]]:
    """Return the tensors without tied names, and without buffers that the model's code makes as they are.

    Raises:
        ModelError: a file has other values for them.
    """
    found = dict(tensors)
    for name, first in model.tied.items():
        if name in found:
            value = found.pop(name)
            if not np.array_equal(found.setdefault(first, value), value):
                raise ModelError(
                    f"model.weights: {source}: tensors {first} and {name} differ; {model.spec.name} ties them"
                )
    for name, buffer in model.buffers.items():
        value = found.pop(name, buffer)
        if value.shape != buffer.shape or not np.allclose(value, buffer, rtol=1e-5, equal_nan=True):
            raise ModelError(
                f"model.weights: {source}: buffer {name} has other values than {model.spec.name} builds, and"
                " devices build it too; set it in the model's function, and remove it from the file"
            )
    return found


def _start(
    tensors: Mapping[str, NDArray[Any]], model: Model, source: str, continues: str | None = None
) -> Start:
    """Make the initial weights from named tensors."""
    backbone = model.spec.backbone
    _refuse_others(tensors, model.spec, source)
    if not isinstance(backbone, Backbone):
        return Start(_assembled(tensors, model, source), continues)
    frozen = {}
    for tensor in backbone.tensors:
        if tensor.name not in tensors:
            raise ModelError(
                f"model.weights: {source} has no tensor {tensor.name}, which is frozen in {model.spec.name}"
            )
        frozen[tensor.name] = _checked(tensors[tensor.name], tensor, source)
    fitting = {name: value for name, value in tensors.items() if _fits(name, value, model.spec, source)}
    return Start(_assembled(fitting, model, source), continues, frozen)


def _fits(name: str, value: NDArray[Any], spec: ModelSpec, source: str) -> bool:
    """True if a tensor is trainable and has the model's shape. A tensor of another shape keeps its random
    initial values, e.g. for other classes.
    """
    own = next((tensor for tensor in spec.tensors if tensor.name == name), None)
    if own is not None and own.shape != value.shape:
        log.warning(
            "%s: tensor %s has the shape %s, the model's has %s; it keeps its random initial values",
            *(source, name, value.shape, own.shape),
        )
    return own is not None and own.shape == value.shape


def _assembled(tensors: Mapping[str, NDArray[Any]], model: Model, source: str) -> FlatArray:
    """Assemble a flat vector from named tensors; missing running statistics keep their initial values."""
    weights, spec = model.weights.copy(), model.spec
    whole = not isinstance(spec.backbone, Backbone)
    for tensor, view in spec.views(weights):
        if tensor.name in tensors:
            view[...] = _checked(tensors[tensor.name], tensor, source)
        elif whole and tensor.kind != "stat":
            raise ModelError(f"model.weights: {source} has no tensor {tensor.name}, which {spec.name} has")
    return weights


def _checked(found: NDArray[Any], tensor: TensorSpec | FrozenTensor, source: str) -> FlatArray:
    if found.dtype.kind != "f":
        raise ModelError(
            f"model.weights: {source}: tensor {tensor.name} is {found.dtype}; save it as float32"
        )
    if found.shape != tensor.shape:
        raise ModelError(
            f"model.weights: {source}: tensor {tensor.name} is {found.shape}; the model has {tensor.shape}"
        )
    with np.errstate(over="ignore"):
        values = found.astype(np.float32)
    if not np.isfinite(values).all():
        raise ModelError(f"model.weights: {source}: tensor {tensor.name} holds NaN or infinite values")
    return values


def _refuse_others(tensors: Mapping[str, NDArray[Any]], spec: ModelSpec, source: str) -> None:
    known = {*(tensor.name for tensor in spec.tensors), *(tensor.name for tensor in spec.frozen)}
    other = next((name for name in sorted(tensors) if name not in known), None)
    if other is not None:
        count = math.prod(tensors[other].shape)
        raise ModelError(
            f"model.weights: {source}: tensor {other} ({count:,} values) is not in {spec.name}; remove it,"
            " or name the tensors as the model's state_dict does"
        )
