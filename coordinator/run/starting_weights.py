"""What a run starts from where `model.weights` says so: another run's shared model, or a safetensors file.

Running statistics are taken over where they are there; else they begin as the model makes them.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.run.models import Model
from fleetune.coordinator.run.stored_run import Run, look_at
from fleetune.protocols.errors import FleetuneError, ModelError, SettingError
from fleetune.protocols.model.carried_layers import carry_over
from fleetune.protocols.model.spec import FlatArray, ModelSpec, TensorSpec
from fleetune.protocols.settings.run_settings import RunSettings

log = logging.getLogger(__name__)

FROM_RUN = "run:"
_COUNTER = "num_batches_tracked"  # torch saves it beside running statistics; no model of ours has it
_FLOATS = ("F16", "F32", "F64")


@dataclass(frozen=True)
class Start:
    """What a run starts from.

    Attributes:
        weights: shape (spec.size,).
        continues: id of the run that they are from; None: of no run.
    """

    weights: FlatArray
    continues: str | None


def run_named(settings: RunSettings) -> str | None:
    """The run whose shared model this one starts from; None: it starts from no run."""
    named = settings.model.weights or ""
    return named.removeprefix(FROM_RUN) if named.startswith(FROM_RUN) else None


def start_of(settings: RunSettings, model: Model, runs: Path) -> Start:
    """The weights that the run's devices get first.

    Args:
        settings: of the run.
        model: with the weights it would start from otherwise.
        runs: the folder that other runs are in.

    Raises:
        SettingError: there is no such run.
        ModelError: there is no such file, or what it holds is not for this model; the tensor is named.
    """
    if settings.model.weights is None:
        return Start(model.weights, None)
    name = run_named(settings)
    if name is not None:
        if name == settings.run.name:
            raise SettingError(f"model.weights: run {name} cannot start from itself")
        return _from_run(name, model, runs)
    path = Path(settings.model.weights)
    return Start(_assembled(_read_file(path), model, str(path)), None)


def _from_run(name: str, model: Model, runs: Path) -> Start:
    if Path(name).name != name:
        raise SettingError(f"model.weights: {name!r} is no name of a run in {runs}")
    try:
        with look_at(runs / name) as run:
            tensors = _carried(run, model, name)
            return Start(_assembled(tensors, model, f"run {name}"), run.enrolment.run)
    except SettingError as problem:
        raise SettingError(f"model.weights: {problem}") from None


def _carried(run: Run, model: Model, name: str) -> Mapping[str, NDArray[Any]]:
    """The tensors that a model starts from where a run goes before it: those of that run; of another version
    of the model, those that are kept, and its own else.

    Raises:
        ModelError: it keeps none.
    """
    before, weights = run.enrolment.spec, run.controller.shared_model
    if before.hash != model.spec.hash:
        found = carry_over(before, weights, model.spec, model.weights)
        if not found.kept:
            raise ModelError(
                f"model.weights: run {name} has no layer that {model.spec.name} has, by name and shapes"
            )
        if found.new or found.gone:
            log.warning("another model than that of run %s: %s", name, found.words)
            before, weights = model.spec, found.weights
    return {tensor.name: view for tensor, view in before.views(weights)}


def _read_file(path: Path) -> Mapping[str, NDArray[Any]]:
    """The float tensors in a safetensors file, by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if not name.endswith(_COUNTER)]  # noqa: SIM118 - no mapping
            for name in names:
                kind = file.get_slice(name).get_dtype()
                if kind not in _FLOATS:
                    raise ModelError(f"model.weights: {path}: tensor {name} is {kind}; save it as float32")
            return {name: file.get_tensor(name) for name in names}
    except FleetuneError:
        raise
    except OSError as problem:
        raise ModelError(f"model.weights: cannot read {path}: {problem.strerror or 'no such file'}") from None
    except SafetensorError as problem:
        raise ModelError(f"model.weights: {path} is no safetensors file, or damaged ({problem})") from None


def _assembled(tensors: Mapping[str, NDArray[Any]], model: Model, source: str) -> FlatArray:
    """One flat vector of named tensors; statistics that are not there stay as the model begins."""
    weights, spec = model.weights.copy(), model.spec
    for tensor, view in spec.views(weights):
        if tensor.name in tensors:
            view[...] = _checked(tensors[tensor.name], tensor, source)
        elif tensor.kind != "stat":
            raise ModelError(f"model.weights: {source} has no tensor {tensor.name}, which {spec.name} has")
    _refuse_others(tensors, spec, source)
    return weights


def _checked(found: NDArray[Any], tensor: TensorSpec, source: str) -> FlatArray:
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
    known = {tensor.name for tensor in spec.tensors}
    other = next((name for name in sorted(tensors) if name not in known), None)
    if other is not None:
        count = math.prod(tensors[other].shape)
        raise ModelError(f"model.weights: {source}: tensor {other} ({count:,} values) is not in {spec.name}")
