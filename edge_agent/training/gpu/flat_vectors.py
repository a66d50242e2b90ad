"""Weights and gradients of a network, in process memory and in the memory where torch computes."""

import torch
from torch import Tensor

from fleetune.edge_agent.training.gpu.torch_device import PROCESSOR
from fleetune.protocols.model.spec import FlatArray, ModelSpec

_ALIGNED = 64  # entries: GPU kernels read 16 bytes at a time, so each tensor starts at a multiple


class FlatVectors:
    """Weights and gradient of one network.

    With a GPU each vector exists twice. The weights are either in process memory and copied to the GPU
    before each step, with the gradient copied back after it. Or they are kept on the GPU and copied back when
    they are read.

    Attributes:
        weights, gradient: vectors in process memory, shape (spec.size,).
        torch_weights, torch_gradient: vectors where torch computes, shape (torch_size,), with aligned
            tensors. On the processor these are the same arrays.
        places: range of each tensor in a torch vector, by name.
    """

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec, self._device = spec, device
        pinned = device.type == "cuda"  # pinned memory is copied twice as fast
        self.weights = torch.zeros(spec.size, pin_memory=pinned)
        self.gradient = torch.zeros(spec.size, pin_memory=pinned)
        self.torch_weights, self.torch_gradient = self.weights, self.gradient
        self.places = dict(spec.slices)
        self._kept_on_gpu = False
        if self.on_gpu:
            self.places, size = _aligned(spec)
            self.torch_weights, self.torch_gradient = (torch.zeros(size, device=device) for _ in range(2))

    @property
    def on_gpu(self) -> bool:
        """True if torch computes in another memory than the process."""
        return self._device != PROCESSOR

    @property
    def torch_size(self) -> int:
        """Number of entries of a torch vector: first the parameters, then the statistics, with gaps."""
        return len(self.torch_weights)

    def torch_stop(self, stop: int) -> int:
        """Return the position in a torch vector at which a flat vector's first `stop` entries end."""
        for name, place in self._spec.slices.items():
            if stop < place.stop:
                return int(self.places[name].start + max(0, stop - place.start))
        return self.torch_size

    def to_torch(self, vector: Tensor) -> Tensor:
        """Return a flat vector, shape (spec.size,), in the layout of a torch vector, in new memory."""
        pieces, end = [], 0
        for name, place in self._spec.slices.items():
            at = self.places[name]
            if at.start > end:
                pieces.append(vector.new_zeros(at.start - end))
            pieces.append(vector[place])
            end = at.stop
        if self.torch_size > end:
            pieces.append(vector.new_zeros(self.torch_size - end))
        return torch.cat(pieces)

    def from_torch(self, vector: Tensor) -> Tensor:
        """Return a torch vector in the layout of a flat vector, in new memory."""
        return torch.cat([vector[self.places[name]] for name in self._spec.slices])

    def upload(self) -> None:
        """Copy the weights to the GPU, unless they are kept there."""
        if self.on_gpu and not self._kept_on_gpu:
            self.torch_weights.copy_(self.to_torch(self.weights.to(self._device)))

    def download(self, *, statistics: bool) -> None:
        """Copy back the gradient and statistics that a step has moved, unless they are kept on the GPU."""
        if not self.on_gpu or self._kept_on_gpu:
            return
        self.gradient.copy_(self.from_torch(self.torch_gradient))
        if statistics and self._spec.size > self._spec.num_parameters:
            at = slice(self._spec.num_parameters, None)
            self.weights[at] = self.from_torch(self.torch_weights)[at].to(PROCESSOR)

    def download_weights(self) -> None:
        """Copy all weights back."""
        if self.on_gpu:
            self.weights.copy_(self.from_torch(self.torch_weights))

    def keep_on_gpu(self) -> None:
        """Keep weights and gradient on the GPU from now on."""
        self.upload()
        self._kept_on_gpu = self.on_gpu

    def load(self, weights: FlatArray) -> None:
        """Copy weights, shape (spec.size,), into process memory, and stop keeping weights on the GPU."""
        self._kept_on_gpu = False
        self.weights.numpy()[:] = weights

    def current_weights(self) -> FlatArray:
        """Return the weights, shape (spec.size,).

        The array is live unless the weights are kept on the GPU.
        """
        if self._kept_on_gpu:
            self.download_weights()
        found: FlatArray = self.weights.numpy()
        return found

    def current_gradient(self) -> FlatArray:
        """Return the gradient, shape (spec.size,).

        The array is live unless the gradient is kept on the GPU.
        """
        if self._kept_on_gpu:
            self.gradient.copy_(self.from_torch(self.torch_gradient))
        found: FlatArray = self.gradient.numpy()
        return found


def _aligned(spec: ModelSpec) -> tuple[dict[str, slice], int]:
    """Return the range of each tensor in a torch vector, and the end of the last tensor."""
    places, end = {}, 0
    for name, place in spec.slices.items():
        places[name] = slice(end, end + place.stop - place.start)
        end += -(-(place.stop - place.start) // _ALIGNED) * _ALIGNED
    return places, end
