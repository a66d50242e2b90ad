"""What training a model takes, by one step of it."""

import torch
from torch import Tensor, nn

from fleetune.protocols.model.token_ids import blank_batch


def activation_bytes(module: nn.Module, input_shape: tuple[int, ...]) -> float:
    """Bytes that the forward pass of one training step keeps for the backward pass, per sample, the inputs
    included. A tensor that several operations keep counts once, the model's own do not.
    """
    batch = blank_batch(module, input_shape)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(batch)
    return sum(kept.values()) / len(batch)
