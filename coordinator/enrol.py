"""What every device of a run starts from, made once by the coordinator."""

import uuid

import torch
from torch import Tensor

from coordinator.blueprint import draw
from protocols.architectures import build, training_flops
from protocols.errors import SettingError
from protocols.payloads import Enrolment, run_key
from protocols.settings import RunSettings


def prepare(settings: RunSettings) -> Enrolment:
    """Describe the model, draw its initial weights, count its work and memory; the run gets a unique id.

    Args:
        settings: of the run; `model.input_shape` and `model.num_classes` must be there.

    Raises:
        SettingError: the model's shape is not known.
        ModelError: the model cannot be built or described.
    """
    model = settings.model
    if model.input_shape is None or model.num_classes is None:
        raise SettingError(
            "model.input_shape and model.num_classes are missing: a coordinator has no data to read them "
            "from, e.g. input_shape = [1, 28, 28] and num_classes = 10"
        )
    spec, weights = draw(
        model.name, model.input_shape, model.num_classes, run_key(settings.run.seed).child("weights")
    )
    return Enrolment(
        run=f"{settings.run.name}-{uuid.uuid4().hex[:8]}",
        seed=settings.run.seed,
        spec=spec,
        method=settings.method,
        training=settings.training,
        mean=settings.data.mean,
        std=settings.data.std,
        validation_fraction=settings.data.validation_fraction,
        deadline_s=settings.round.deadline_s,
        flops_per_sample=training_flops(
            build(model.name, model.input_shape, model.num_classes), model.input_shape
        ),
        activation_bytes_per_sample=activation_bytes(model.name, model.input_shape, model.num_classes),
        weights=weights,
    )


def activation_bytes(name: str, input_shape: tuple[int, ...], num_classes: int) -> float:
    """Bytes that the forward pass of one training step keeps for the backward pass, per sample, the inputs
    included. A tensor that several operations keep counts once, the model's own do not.
    """
    module, batch = build(name, input_shape, num_classes), 2
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(torch.zeros(batch, *input_shape))
    return sum(kept.values()) / batch
