"""The initial data for every device of a run, made once by the coordinator."""

import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from msgspec import UNSET, UnsetType

from fleetune.coordinator.extensions.privacy.accountant import most_tasks
from fleetune.coordinator.run.models import Model, find_model
from fleetune.coordinator.run.starting_weights import start_of
from fleetune.protocols.errors import SettingError
from fleetune.protocols.methods import with_defaults_of_run
from fleetune.protocols.model.backbone_file import Tensors, backbone_file
from fleetune.protocols.model.input_scaling import check_channels
from fleetune.protocols.model.spec import Backbone, ModelSpec
from fleetune.protocols.settings.encoding import PLAIN
from fleetune.protocols.settings.rate_schedule import with_schedule_of_run
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.task import TaskSection
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.protocols.wire.transfer import digest_of


@dataclass(frozen=True)
class Beginning:
    """The enrolment of a new run, with the files that belong to it.

    Attributes:
        enrolment: sent to each device.
        backbone: file of the model's frozen tensors; None if no tensor is frozen.
        bundle: the model's encoded bundle; None if not made yet.
    """

    enrolment: Enrolment
    backbone: bytes | None = None
    bundle: bytes | None = None


def prepare(settings: RunSettings, runs: Path = Path("runs")) -> Enrolment:
    """Make the enrolment for the model that `find_model` finds.

    Raises:
        FleetuneError: as `begin`.
    """
    return begin(settings, runs).enrolment


def begin(
    settings: RunSettings, runs: Path = Path("runs"), find: Callable[[RunSettings], Model] = find_model
) -> Beginning:
    """Describe the model, find its initial weights, count its work and memory; the run gets a unique id.

    Args:
        settings: settings of the run, with `model.input_shape` and `model.num_classes`.
        runs: the folder of other runs, for `model.weights`.
        find: function that finds the model.

    Raises:
        SettingError: the model's shape is not known, or there is no run to start from.
        ModelError: the model cannot be built or described, or the weights to start from are not for it.
    """
    return beginning_of(settings, find(settings), runs)


def beginning_of(settings: RunSettings, model: Model, runs: Path) -> Beginning:
    """Make the enrolment for a run of `model`; the run gets a unique id.

    Raises:
        SettingError: data.mean or data.std is not one number for each channel of the model.
        FleetuneError: as `start_of`.
    """
    check_channels(settings.data.mean, settings.data.std, model.spec.input_shape)
    start, adoption = start_of(settings, model, runs), settings.adoption
    validation_fraction = adoption.validation_fraction(settings.data.validation_fraction)
    spec, backbone = _with_digest(model.spec, start.frozen, settings.model.backbone)
    enrolment = Enrolment(
        run=f"{settings.run.name}-{uuid.uuid4().hex[:8]}",
        seed=settings.run.seed,
        spec=spec,
        method=with_defaults_of_run(
            settings.method, settings.run.last_round, time_counts=settings.time_counts
        ),
        training=with_schedule_of_run(settings.training, settings.run.last_round),
        mean=settings.data.mean,
        std=settings.data.std,
        validation_fraction=validation_fraction,
        deadline_s=settings.round.deadline_s,
        flops_per_sample=model.flops_per_sample,
        activation_bytes_per_sample=model.activation_bytes_per_sample,
        weights=start.weights,
        continues=start.continues,
        task=UNSET if settings.task == TaskSection() else settings.task,
        adoption=adoption if adoption.enabled else UNSET,
        encoding=UNSET if settings.encoding.values == PLAIN.values else settings.encoding.values,
        compact=settings.compact or UNSET,
        quick_masks=settings.quick_masks or UNSET,
        proposes=True if settings.proposes_ratios else UNSET,
        least_work=_other_than_once(settings, settings.objective.least_work),
        most_work=_other_than_once(settings, settings.objective.most_work),
        late=settings.objective.late if settings.proposes_ratios else UNSET,
        encodings=settings.uplinks[1:] or UNSET,
        asks_validation=True if validation_fraction else UNSET,
        privacy=settings.privacy or UNSET,
        most_tasks=(settings.privacy and most_tasks(settings.privacy)) or UNSET,
    )
    return Beginning(enrolment, backbone)


def _other_than_once(settings: RunSettings, local_work: float) -> float | UnsetType:
    return local_work if settings.proposes_ratios and local_work != 1 else UNSET


def _with_digest(
    spec: ModelSpec, frozen: Tensors, numbers: Literal["float32", "int8"]
) -> tuple[ModelSpec, bytes | None]:
    """Return the spec with its backbone's digest, and the backbone's file."""
    if not isinstance(spec.backbone, Backbone):
        if numbers != "float32":
            raise SettingError(
                f"model.backbone: nothing is frozen that could be {numbers}; give model.trainable"
            )
        return spec, None
    backbone = replace(spec.backbone, weights=UNSET if numbers == "float32" else numbers)
    file = backbone_file(backbone, frozen)
    return replace(spec, backbone=replace(backbone, digest=digest_of(file))), file
