"""What every device of a run starts from, made once by the coordinator."""

import uuid

from coordinator.models import Model, find_model
from protocols.payloads import Enrolment
from protocols.scaling import check_channels
from protocols.settings import RunSettings


def prepare(settings: RunSettings) -> Enrolment:
    """Describe the model, draw its initial weights, count its work and memory; the run gets a unique id.

    Args:
        settings: of the run; `model.input_shape` and `model.num_classes` must be there.

    Raises:
        SettingError: the model's shape is not known.
        ModelError: the model cannot be built or described.
    """
    return enrolment_of(settings, find_model(settings))


def enrolment_of(settings: RunSettings, model: Model) -> Enrolment:
    """What the devices of a run of `model` get; the run gets a unique id.

    Raises:
        SettingError: data.mean or data.std is not one number for each channel of the model.
    """
    check_channels(settings.data.mean, settings.data.std, model.spec.input_shape)
    return Enrolment(
        run=f"{settings.run.name}-{uuid.uuid4().hex[:8]}",
        seed=settings.run.seed,
        spec=model.spec,
        method=settings.method,
        training=settings.training,
        mean=settings.data.mean,
        std=settings.data.std,
        validation_fraction=settings.data.validation_fraction,
        deadline_s=settings.round.deadline_s,
        flops_per_sample=model.flops_per_sample,
        activation_bytes_per_sample=model.activation_bytes_per_sample,
        weights=model.weights,
    )
