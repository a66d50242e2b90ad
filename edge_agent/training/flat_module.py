"""A torch module whose parameters and running statistics are views of flat vectors."""

import copy
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleetune.edge_agent.training.backend import InputArray, LabelArray, check_labels
from fleetune.edge_agent.training.gpu.flat_vectors import FlatVectors
from fleetune.edge_agent.training.gpu.torch_device import PROCESSOR, fork_seeded
from fleetune.edge_agent.training.torch_loss_terms import LastLayer
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model import architectures
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.spec import Backbone, FlatArray, ModelSpec
from fleetune.protocols.model.token_ids import samples_of
from fleetune.protocols.model.torch_backbone import (
    as_described,
    is_counter,
    is_frozen,
    is_statistic,
    set_frozen,
)
from fleetune.protocols.randomness import Key


class FlatModule:
    """A torch module on the processor or a GPU, with its tensors in flat vectors.

    Image networks compute with the channels last, which is the same function and faster.

    Attributes:
        spec: description of the model.
        module: the torch module, whose tensors are views of `vectors`.
        device: where torch computes.
        vectors: weights and gradients.
        parameters: trainable parameters by name.
        last_layer: the last layer with weights.

    Raises:
        ModelError: the module's tensors differ from the spec's, or the device cannot hold them.
    """

    def __init__(self, spec: ModelSpec, module: nn.Module, device: torch.device) -> None:
        check_same(spec, module)
        self.spec, self.module, self.device = spec, module, device
        self._samples = samples_of(module, spec.input_shape)
        try:
            self.vectors = FlatVectors(spec, device)
            module.to(device)
        except (
            RuntimeError
        ) as problem:  # too little memory, or a tensor type that the device does not support
            raise ModelError(f"device {device} cannot hold model {spec.name}: {problem}") from problem
        self.parameters = move_into_vectors(spec, module, self.vectors)
        self.last_layer = LastLayer(spec, module)
        self._initial_buffers = InitialBuffers(module, device)
        self._channels_last = any(isinstance(part, nn.Conv2d) for part in module.modules())
        self._input_dtype = torch.int64 if self._samples.ids else torch.float32

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids, see `Backend.vocabulary`."""
        return self._samples.vocabulary if self._samples.ids else None

    def load(self, weights: FlatArray) -> None:
        """Copy `weights`, shape (spec.size,), into the vectors and reset all other buffers.

        Raises:
            ModelError: `weights` has another shape.
        """
        if weights.shape != (self.spec.size,):
            raise ModelError(
                f"model {self.spec.name} has {self.spec.size} weights, but got an array of shape"
                f" {weights.shape}"
            )
        self.vectors.load(weights)
        self._initial_buffers.restart()

    def inputs(self, x: InputArray) -> Tensor:
        """Return samples in the module's form, on the device where torch computes."""
        return self.shaped(torch.from_numpy(x))

    def shaped(self, x: Tensor) -> Tensor:
        """Return samples moved to the device, in the module's type and memory layout."""
        inputs = x.to(self.device, self._input_dtype)
        return channels_last(inputs) if self._channels_last and inputs.ndim == 4 else inputs

    def targets(self, y: LabelArray) -> Tensor:
        """Return labels as a tensor on the processor or GPU that trains.

        Raises ModelError for a GPU if a label is out of range, because CUDA would abort.
        """
        self.check_labels(y)
        return torch.from_numpy(y).to(self.device)

    def check_labels(self, y: LabelArray) -> None:
        """Raise ModelError if a label is wrong and the model is on a GPU."""
        if self.device != PROCESSOR and y.ndim == 1 and y.dtype == np.int64:
            # CUDA aborts on a wrong label and is unusable from then on.
            check_labels(self.spec, y)

    def synthetic_samples(self, num_samples: int) -> Tensor:
        """Return samples of numbers between -1 and 1, or of the first token id."""
        numbers = torch.arange(num_samples * math.prod(self.spec.input_shape)).reshape(
            num_samples, *self.spec.input_shape
        )
        return self.inputs((numbers.sin() if not self._samples.ids else 0 * numbers).numpy())

    @contextmanager
    def only_gradients_of(self, tensors: Collection[str] | None) -> Iterator[None]:
        """Let autograd compute the gradients of only these parameters in this context; None for all."""
        others = [] if tensors is None else [p for name, p in self.parameters.items() if name not in tensors]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def shrunk(self, spec: ModelSpec) -> nn.Module | None:
        """Return a copy of the module with the smaller tensors of `spec`; None if the module cannot be
        copied.
        """
        shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
        copies: dict[int, Any] = {}  # copy.deepcopy takes these instead of copying the tensors themselves
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name in shapes:
                value = torch.zeros(shapes[name], device=self.device)
                copies[id(tensor)] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
        try:
            return copy.deepcopy(self.module, copies)
        except Exception:  # noqa: BLE001 - a user's module may raise anything
            return None


def build_module(spec: ModelSpec, frozen: Tensors) -> nn.Module:
    """Build a model by its name, with the frozen tensors of its backbone.

    Raises:
        ModelError: the model is unknown here, or it differs from the fleet's.
    """
    with fork_seeded(Key(0)):  # building draws initial weights, which must not move torch's global generator
        module = architectures.build(spec.name, spec.input_shape, spec.num_classes, spec.reads)
    as_described(spec, module)
    if isinstance(spec.backbone, Backbone):
        set_frozen(module, frozen)
    return module


def move_into_vectors(spec: ModelSpec, module: nn.Module, vectors: FlatVectors) -> dict[str, nn.Parameter]:
    """Move the module's tensors into the vectors, and return its trainable parameters by name."""
    parameters, statistics = dict(module.named_parameters()), dict(module.named_buffers())
    for tensor in spec.tensors:
        place = vectors.places[tensor.name]
        view = vectors.torch_weights[place].view(tensor.shape)
        if tensor.kind == "stat":
            view.copy_(statistics[tensor.name])
            owner, _, name = tensor.name.rpartition(".")
            module.get_submodule(owner).register_buffer(name, view)
        else:
            parameter = parameters[tensor.name]
            view.copy_(parameter.data)
            parameter.data = view
            parameter.grad = vectors.torch_gradient[place].view(tensor.shape)
    vectors.download_weights()
    return {name: one for name, one in parameters.items() if one.requires_grad}


class InitialBuffers:
    """Restores buffers that are not weights, such as norms' counters and a user module's own buffers.

    They are reset with the weights, so that one device's training does not affect the next device.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._on_card = device.type != "cpu"
        self._buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []  # owner, name, buffer, initial value
        self._versions: list[int] = []
        for name, buffer in module.named_buffers():
            owner = module.get_submodule(name.rpartition(".")[0])
            if is_statistic(module, name) or is_frozen(owner):
                continue
            first = torch.zeros_like(buffer) if is_counter(name) else buffer.detach().clone()
            self._buffers.append((owner, name.rpartition(".")[2], buffer, first))
            self._versions.append(-1)

    def restart(self) -> None:
        """Restore the initial values of changed buffers; on a GPU of all buffers, because CUDA graphs hide
        changes.
        """
        for index, (owner, leaf, buffer, first) in enumerate(self._buffers):
            if getattr(owner, leaf) is not buffer:
                owner.register_buffer(leaf, buffer)
            writes = buffer._version  # noqa: SLF001 - torch has no other sign of them
            if self._on_card or writes != self._versions[index]:
                with torch.no_grad():
                    buffer.copy_(first)
                self._versions[index] = writes + 1


def check_same(spec: ModelSpec, module: nn.Module) -> None:
    """Raise ModelError if parameters or running statistics differ from the spec in name, shape or order."""
    own = [(name, tuple(value.shape)) for name, value in module.named_parameters() if value.requires_grad]
    statistics = [(name, tuple(value.shape)) for name, value in module.named_buffers()]
    own += [(name, shape) for name, shape in statistics if is_statistic(module, name)]
    fleet = [(tensor.name, tensor.shape) for tensor in spec.tensors]
    for theirs, ours in zip_longest(fleet, own, fillvalue=("(nothing)", ())):
        if theirs != ours:
            raise ModelError(
                f"this device's model {spec.name} differs from the fleet's at {theirs[0]}: the fleet has"
                f" {theirs[0]} {theirs[1]}, this device {ours[0]} {ours[1]}; install the fleet's version"
            )
    if any(value.dtype != torch.float32 for value in module.parameters()):
        raise ModelError(
            f"model {spec.name} has parameters that are not float32; only float32 can be trained"
        )


def channels_last(x: Tensor) -> Tensor:
    """Return the same images with the channels innermost in memory.

    A single channel is already innermost, but torch decides by the strides.
    """
    if x.shape[1] == 1:
        _, _, height, width = x.shape
        return x.contiguous().as_strided(x.shape, (height * width, 1, width, 1))
    return x.contiguous(memory_format=torch.channels_last)
