"""A torch module taken over: the fleet's model, with its tensors in flat vectors and its images turned."""

from itertools import zip_longest

import torch
from torch import Tensor, nn

from fleetune.edge_agent.training.gpu.flat_vectors import FlatVectors
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.model.torch_backbone import is_counter, is_frozen, is_statistic


def move_into_vectors(spec: ModelSpec, module: nn.Module, vectors: FlatVectors) -> dict[str, nn.Parameter]:
    """Move the module's tensors into the first row of the vectors, where torch computes; its trainable
    parameters by name.
    """
    parameters, statistics = dict(module.named_parameters()), dict(module.named_buffers())
    for tensor in spec.tensors:
        place = vectors.places[tensor.name]
        view = vectors.torch_weights[0, place].view(tensor.shape)
        if tensor.kind == "stat":
            view.copy_(statistics[tensor.name])
            owner, _, name = tensor.name.rpartition(".")
            module.get_submodule(owner).register_buffer(name, view)
        else:
            parameter = parameters[tensor.name]
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = vectors.torch_gradients[0, place].view(tensor.shape)
    vectors.download_weights()
    return {name: one for name, one in parameters.items() if one.requires_grad}


class InitialBuffers:
    """The buffers that are no part of the weights: counters of norms, and what a user's module keeps itself.
    They start anew with the weights, so that one device's training leaves nothing behind for the next.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._on_card = device.type != "cpu"
        self._kept: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # owner, name, buffer, its first value
        self._versions: list[int] = []
        for name, buffer in module.named_buffers():
            owner = module.get_submodule(name.rpartition(".")[0])
            if is_statistic(module, name) or is_frozen(owner):
                continue
            first = torch.zeros_like(buffer) if is_counter(name) else buffer.detach().clone()
            self._kept.append((owner, name.rpartition(".")[2], buffer, first))
            self._versions.append(-1)

    def restart(self) -> None:
        """Put the first values back where they have changed. Repeated steps of a card hide such changes."""
        for index, (owner, leaf, buffer, first) in enumerate(self._kept):
            if getattr(owner, leaf) is not buffer:
                owner.register_buffer(leaf, buffer)
            writes = buffer._version  # noqa: SLF001 - torch has no other sign of them
            if self._on_card or writes != self._versions[index]:
                with torch.no_grad():
                    buffer.copy_(first)
                self._versions[index] = writes + 1


def check_same(spec: ModelSpec, module: nn.Module) -> None:
    """The same parameters in the same order, and the same running statistics."""
    own = [(name, tuple(value.shape)) for name, value in module.named_parameters() if value.requires_grad]
    statistics = [(name, tuple(value.shape)) for name, value in module.named_buffers()]
    own += [(name, shape) for name, shape in statistics if is_statistic(module, name)]
    fleet = [(tensor.name, tensor.shape) for tensor in spec.tensors]
    for theirs, ours in zip_longest(fleet, own, fillvalue=("(nothing)", ())):
        if theirs != ours:
            raise ModelError(
                f"this device's model {spec.name} differs from the fleet's at {theirs[0]}: the fleet has"
                f" {theirs[0]} {theirs[1]}, this device {ours[0]} {ours[1]}; install its version"
            )
    if any(value.dtype != torch.float32 for value in module.parameters()):
        raise ModelError(
            f"model {spec.name} has parameters that are not float32; only float32 can be trained"
        )


def channels_last(x: Tensor) -> Tensor:
    """The same images with the channels innermost in memory. One channel is innermost already, but torch
    goes by the strides.
    """
    if x.shape[1] == 1:
        _, _, height, width = x.shape
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)
