"""Measures the memory of one training step."""

import torch
from torch import Tensor, nn

from fleetune.protocols.model.token_ids import blank_batch


def activation_bytes(module: nn.Module, input_shape: tuple[int, ...]) -> float:
    """Return how many bytes a training step's forward pass keeps for the backward pass, for each sample.

    The inputs are included. A tensor that several operations keep counts once. The tensors of the model
    itself do not count.
    """
    batch = blank_batch(module, input_shape)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    bytes_by_storage: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            bytes_by_storage[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(batch)
    return sum(bytes_by_storage.values()) / len(batch)
