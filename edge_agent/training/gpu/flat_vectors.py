"""Weights and gradients of one or several networks, in process memory and where torch computes."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fleetune.edge_agent.training.gpu.torch_device import PROCESSOR
from fleetune.protocols.model.spec import FlatArray, ModelSpec

_ALIGNED = 64  # entries: GPU kernels read 16 bytes at a time, so each tensor starts at a multiple


class FlatVectors:
    """Weights and gradients with a row for each network.

    With a GPU each vector exists twice. A row's weights are either in process memory and copied to the GPU
    before each step, with the gradient copied back after it. Or they are kept on the GPU and copied back when
    they are read.

    Attributes:
        weights, gradients: vectors in process memory, shape (rows, spec.size).
        torch_weights, torch_gradients: vectors where torch computes, shape (rows, torch_size), with aligned
            tensors. On the processor these are the same arrays.
        places: range of each tensor in a torch row, by name.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, rows: int = 1) -> None:
        self._spec, self._device = spec, device
        pinned = device.type == "cuda"  # pinned memory is copied twice as fast
        self.weights = torch.zeros(rows, spec.size, pin_memory=pinned)
        self.gradients = torch.zeros(rows, spec.size, pin_memory=pinned)
        self.torch_weights, self.torch_gradients = self.weights, self.gradients
        self.places = dict(spec.slices)
        self._row_on_gpu = [False] * rows
        if self.on_gpu:
            self.places, size = _aligned(spec)
            self.torch_weights, self.torch_gradients = (
                torch.zeros(rows, size, device=device) for _ in range(2)
            )

    @property
    def on_gpu(self) -> bool:
        """True if torch computes in another memory."""
        return self._device != PROCESSOR

    @property
    def torch_size(self) -> int:
        """Entries of a row there: first the parameters, then the statistics, with gaps."""
        return self.torch_weights.shape[1]

    def torch_stop(self, stop: int) -> int:
        """Position there of the end of a flat vector's first `stop` entries."""
        for name, place in self._spec.slices.items():
            if stop < place.stop:
                return int(self.places[name].start + max(0, stop - place.start))
        return self.torch_size

    def to_torch(self, rows: Tensor) -> Tensor:
        """Rows of flat vectors, shape (n, spec.size), in the layout there, in new memory."""
        pieces, end = [], 0
        for name, place in self._spec.slices.items():
            at = self.places[name]
            if at.start > end:
                pieces.append(rows.new_zeros(len(rows), at.start - end))
            pieces.append(rows[:, place])
            end = at.stop
        if self.torch_size > end:
            pieces.append(rows.new_zeros(len(rows), self.torch_size - end))
        return torch.cat(pieces, 1)

    def from_torch(self, rows: Tensor) -> Tensor:
        """Rows in the layout there as flat vectors, in new memory."""
        return torch.cat([rows[:, self.places[name]] for name in self._spec.slices], 1)

    def rows(self, vectors: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows of `torch_weights` or `torch_gradients`. If these are all rows, the tensor itself."""
        return vectors if len(rows) == len(vectors) else torch.stack([vectors[row] for row in rows])

    def upload(self, rows: Iterable[int] = (0,)) -> None:
        """Copy the weights of rows that are not kept on the GPU to it."""
        coming = [row for row in rows if self.on_gpu and not self._row_on_gpu[row]]
        if len(coming) == len(self.weights):
            self.torch_weights.copy_(self.to_torch(self.weights.to(self._device)))
        elif coming:
            for row, near in zip(coming, self.to_torch(self.weights[coming].to(self._device)), strict=True):
                self.torch_weights[row].copy_(near)

    def download(self, rows: Iterable[int] = (0,), *, statistics: bool) -> None:
        """Copy back gradients, and statistics that a step has moved, of rows that are not kept on the GPU."""
        coming = [row for row in rows if self.on_gpu and not self._row_on_gpu[row]]
        if not coming:
            return
        gradients = self.from_torch(self.rows(self.torch_gradients, coming))
        # the destination is pinned memory, which halves the time of the copy
        if len(coming) == len(self.weights):
            self.gradients.copy_(gradients)
        else:
            self.gradients[coming] = gradients.to(PROCESSOR)
        at = slice(self._spec.num_parameters, None)
        if statistics and self._spec.size > self._spec.num_parameters:
            near = self.from_torch(self.rows(self.torch_weights, coming))
            self.weights[coming, at] = near[:, at].to(PROCESSOR)

    def download_weights(self) -> None:
        """Copy all weights back."""
        if self.on_gpu:
            self.weights.copy_(self.from_torch(self.torch_weights))

    def keep_on_gpu(self, row: int = 0) -> None:
        """Keep a row on the GPU from now on."""
        self.upload([row])
        self._row_on_gpu[row] = self.on_gpu

    def is_on_gpu(self, row: int) -> bool:
        """True if the row's weights are kept on the GPU."""
        return self._row_on_gpu[row]

    def store(self, row: int, weights: FlatArray, gradient: FlatArray) -> None:
        """Store a row that was computed elsewhere."""
        self.weights[row].numpy()[:], self.gradients[row].numpy()[:] = weights, gradient
        if self._row_on_gpu[row]:
            for near, own in ((self.torch_weights, self.weights), (self.torch_gradients, self.gradients)):
                near[row].copy_(self.to_torch(own[row : row + 1].to(self._device))[0])

    def load(self, weights: FlatArray, row: int = 0) -> None:
        """Copy weights, shape (spec.size,), into a row of process memory. The row is no longer kept on the
        GPU.
        """
        self._row_on_gpu[row] = False
        self.weights[row].numpy()[:] = weights

    def weights_of(self, row: int = 0) -> FlatArray:
        """Weights of a row, shape (spec.size,). The array is live unless the row is kept on the GPU."""
        if self._row_on_gpu[row]:
            self.weights[row].copy_(self.from_torch(self.torch_weights[row : row + 1])[0])
        found: FlatArray = self.weights[row].numpy()
        return found

    def gradient_of(self, row: int = 0) -> FlatArray:
        """Gradient of a row, shape (spec.size,). The array is live unless the row is kept on the GPU."""
        if self._row_on_gpu[row]:
            self.gradients[row].copy_(self.from_torch(self.torch_gradients[row : row + 1])[0])
        found: FlatArray = self.gradients[row].numpy()
        return found


def _aligned(spec: ModelSpec) -> tuple[dict[str, slice], int]:
    """The range of each tensor, and the end of the last one."""
    places, end = {}, 0
    for name, place in spec.slices.items():
        places[name] = slice(end, end + place.stop - place.start)
        end += -(-(place.stop - place.start) // _ALIGNED) * _ALIGNED
    return places, end
