"""Weights and gradients in this process's memory and where torch computes, of one network or of several."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fleetune.edge_agent.training.gpu.torch_device import PROCESSOR
from fleetune.protocols.model.spec import FlatArray, ModelSpec

_ALIGNED = 64  # entries: kernels of cards read 16 bytes at a time, and end where a tensor begins between them


class FlatVectors:
    """A row for each network. On a card there are two of each vector: a row's weights are either those here,
    which are brought there before each step and whose gradient comes back after it, or held there, and come
    back when they are asked for.

    Attributes:
        weights, gradients: in this process's memory, shape (rows, spec.size).
        torch_weights, torch_gradients: where torch computes, shape (rows, torch_size), every tensor of the
            model in its place; on the processor the same as those.
        places: of each tensor in them, by name.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, rows: int = 1) -> None:
        self._spec, self._device = spec, device
        pinned = device.type == "cuda"  # copied twice as fast
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
        """Torch computes in another memory."""
        return self._device != PROCESSOR

    @property
    def torch_size(self) -> int:
        """Entries of a row there: the parameters', then the statistics'."""
        return self.torch_weights.shape[1]

    def torch_stop(self, stop: int) -> int:
        """Where the entries before this one of a flat vector end there."""
        for name, place in self._spec.slices.items():
            if stop < place.stop:
                return int(self.places[name].start + max(0, stop - place.start))
        return self.torch_size

    def to_torch(self, rows: Tensor) -> Tensor:
        """Rows of flat vectors on the card, shape (n, spec.size), as they lie there; new memory."""
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
        """What lies there, as flat vectors; new memory."""
        return torch.cat([rows[:, self.places[name]] for name in self._spec.slices], 1)

    def rows(self, vectors: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows of `torch_weights` or `torch_gradients`: these themselves, if it is all."""
        return vectors if len(rows) == len(vectors) else torch.stack([vectors[row] for row in rows])

    def upload(self, rows: Iterable[int] = (0,)) -> None:
        """The weights of rows that are not held there."""
        coming = [row for row in rows if self.on_gpu and not self._row_on_gpu[row]]
        if len(coming) == len(self.weights):
            self.torch_weights.copy_(self.to_torch(self.weights.to(self._device)))
        elif coming:
            for row, near in zip(coming, self.to_torch(self.weights[coming].to(self._device)), strict=True):
                self.torch_weights[row].copy_(near)

    def download(self, rows: Iterable[int] = (0,), *, statistics: bool) -> None:
        """Of rows that are not held there: the gradient, and the running statistics that a step has moved."""
        coming = [row for row in rows if self.on_gpu and not self._row_on_gpu[row]]
        if not coming:
            return
        gradients = self.from_torch(self.rows(self.torch_gradients, coming))
        if len(coming) == len(self.weights):  # into pinned memory, which is copied in half the time
            self.gradients.copy_(gradients)
        else:
            self.gradients[coming] = gradients.to(PROCESSOR)
        at = slice(self._spec.num_parameters, None)
        if statistics and self._spec.size > self._spec.num_parameters:
            near = self.from_torch(self.rows(self.torch_weights, coming))
            self.weights[coming, at] = near[:, at].to(PROCESSOR)

    def download_weights(self) -> None:
        """All weights, as they are there."""
        if self.on_gpu:
            self.weights.copy_(self.from_torch(self.torch_weights))

    def keep_on_gpu(self, row: int = 0) -> None:
        """Keep a row there from now on."""
        self.upload([row])
        self._row_on_gpu[row] = self.on_gpu

    def is_on_gpu(self, row: int) -> bool:
        """The row's weights are there."""
        return self._row_on_gpu[row]

    def store(self, row: int, weights: FlatArray, gradient: FlatArray) -> None:
        """What was computed of a row elsewhere."""
        self.weights[row].numpy()[:], self.gradients[row].numpy()[:] = weights, gradient
        if self._row_on_gpu[row]:
            for near, own in ((self.torch_weights, self.weights), (self.torch_gradients, self.gradients)):
                near[row].copy_(self.to_torch(own[row : row + 1].to(self._device))[0])

    def load(self, weights: FlatArray, row: int = 0) -> None:
        """Copy weights, shape (spec.size,), into a row here, which is held there no longer."""
        self._row_on_gpu[row] = False
        self.weights[row].numpy()[:] = weights

    def weights_of(self, row: int = 0) -> FlatArray:
        """Shape (spec.size,), live where they are not held there."""
        if self._row_on_gpu[row]:
            self.weights[row].copy_(self.from_torch(self.torch_weights[row : row + 1])[0])
        found: FlatArray = self.weights[row].numpy()
        return found

    def gradient_of(self, row: int = 0) -> FlatArray:
        """Shape (spec.size,), live where the weights are not held there."""
        if self._row_on_gpu[row]:
            self.gradients[row].copy_(self.from_torch(self.torch_gradients[row : row + 1])[0])
        found: FlatArray = self.gradients[row].numpy()
        return found


def _aligned(spec: ModelSpec) -> tuple[dict[str, slice], int]:
    """A place for each tensor, and where the last one ends."""
    places, end = {}, 0
    for name, place in spec.slices.items():
        places[name] = slice(end, end + place.stop - place.start)
        end += -(-(place.stop - place.start) // _ALIGNED) * _ALIGNED
    return places, end
