"""The run's optimiser on a GPU, for one network or for many at once.

It does the same as `edge_agent.training.descent` in the same order. Without clipping the results are equal
to the bit, as far as the GPU computes alike. A step is a few operators on all entries; frozen entries move
by 0.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fleetune.edge_agent.training.descent import CLIP_EPS
from fleetune.edge_agent.training.gpu.flat_vectors import FlatVectors
from fleetune.edge_agent.training.gpu.tensor_groups import StepCountsGroup, TensorGroup
from fleetune.edge_agent.training.gpu.torch_device import for_numpy
from fleetune.edge_agent.training.optimisers import optimiser_of
from fleetune.edge_agent.training.optimisers.optimiser import Optimiser, OptimiserState
from fleetune.protocols.method.trainer import FitPlan, Pull
from fleetune.protocols.settings.device import TrainingSection


@dataclass
class _Stretch:
    """Consecutive entries of one network on the GPU that take the same steps.

    Attributes:
        place: range of the entries.
        weights, gradient: tensors of these entries.
        keep: 1 where trainable, else 0. None: all are trainable.
        vectors: the optimiser's vectors.
        levels, index: steps that the entries had taken before, see `StepCounts`.
        target, pulled: target of the pull, and 1 where it pulls. None: nowhere, or everywhere.
        times: factor on the gradient.
        num_steps: steps taken in this descent.
    """

    place: slice
    weights: Tensor
    gradient: Tensor
    keep: Tensor | None
    vectors: tuple[Tensor, ...]
    levels: NDArray[np.float64]
    index: Tensor | None
    target: Tensor | None
    pulled: Tensor | None
    times: float = 1.0
    num_steps: int = 0

    @property
    def alike(self) -> object:
        """A key: stretches with equal keys can take a step together."""
        return self.place.start, self.keep is None, self.index is None, self.pulled is None


class GpuDescent:
    """An optimiser on the GPU, with the interface of `edge_agent.training.descent.Descent`.

    Args:
        flat_vectors: vectors on the GPU with weights and gradients. The row stays there from now on.
        row: row of the network.
        size, settings, plan, before: see `Descent`.
    """

    def __init__(
        self,
        flat_vectors: FlatVectors,
        row: int,
        size: int,
        settings: TrainingSection,
        plan: FitPlan,
        before: OptimiserState | None,
    ) -> None:
        flat_vectors.keep_on_gpu(row)
        self._vectors, self._row, self._size, self._plan, self._before = flat_vectors, row, size, plan, before
        self.optimiser, self.clip_norm = optimiser_of(settings), settings.clip_norm
        self.pull_strength = None if plan.pull is None else 2 * plan.pull.strength
        self._stretches = self._all_stretches(plan)

    def step(self, *, move_lower: bool = True) -> float | None:
        """Move the trainable weights, see `Descent.step`."""
        return step_all([self], move_lower=move_lower)[0]

    def moving(self, *, move_lower: bool) -> list[_Stretch]:
        """The stretches that take a step."""
        return [one for one in self._stretches if move_lower or not self._is_lower(one.place)]

    def alike(self, *, move_lower: bool) -> object:
        """A key: descents with equal keys can take a step together."""
        stretches = tuple((one.alike, one.times) for one in self.moving(move_lower=move_lower))
        return self.optimiser, self.clip_norm, self.pull_strength, move_lower, stretches

    def state(self) -> OptimiserState:
        """The optimiser's state, see `Descent.state`."""
        assert self._before is not None, "state() needs an optimiser that was given its earlier state"
        found = [
            self._back([one.vectors[number] for one in self._stretches])
            for number in range(self.optimiser.num_vectors)
        ]
        if self.optimiser.counts_steps:
            taken = self._back([torch.full_like(one.gradient, one.num_steps) for one in self._stretches])
            found.append(taken + self._before.vectors[-1] if self._before.vectors else taken)
        if self._plan.trainable is not None:
            frozen = ~self._plan.trainable[: self._size]
            for number, vector in enumerate(found):
                np.copyto(vector, self._before.vectors[number] if self._before.vectors else 0, where=frozen)
        return OptimiserState(tuple(found))

    def _is_lower(self, place: slice) -> bool:
        return self._plan.lower is not None and place.stop <= self._vectors.torch_stop(self._plan.lower.stop)

    def _there(self, vector: NDArray[Any]) -> Tensor:
        """The parameters' entries of a flat vector in the GPU's layout, 0 elsewhere."""
        whole = torch.zeros(1, self._vectors.weights.shape[1])
        whole[0, : self._size] = torch.from_numpy(vector[: self._size].astype(np.float32))
        return self._vectors.to_torch(whole.to(self._vectors.torch_weights.device))[0]

    def _back(self, stretches: Sequence[Tensor]) -> NDArray[np.float32]:
        """A flat vector of the parameters, from the values of the stretches."""
        whole = torch.zeros(1, self._vectors.torch_size, device=self._vectors.torch_weights.device)
        for stretch, values in zip(self._stretches, stretches, strict=True):
            whole[0, stretch.place] = values
        found: NDArray[np.float32] = self._vectors.from_torch(whole)[0, : self._size].cpu().numpy()
        return found

    def _all_stretches(self, plan: FitPlan) -> list[_Stretch]:
        end = self._vectors.torch_stop(self._size)
        middle = 0 if plan.lower is None else min(end, self._vectors.torch_stop(plan.lower.stop))
        keep = None if plan.trainable is None else self._there(plan.trainable)
        target = None if plan.pull is None else self._there(plan.pull.target)
        pulled = self._pulled(plan.pull)
        remembered = [] if self._before is None else [self._there(one) for one in self._before.vectors]
        weights, gradient = self._vectors.torch_weights[self._row], self._vectors.torch_gradients[self._row]
        number = self.optimiser.num_vectors
        vectors = remembered[:number] or [torch.zeros_like(gradient) for _ in range(number)]
        counted = remembered[number] if self.optimiser.counts_steps and remembered else None
        return [
            _Stretch(
                at,
                weights[at],
                gradient[at],
                None if keep is None else keep[at],
                tuple(vector[at] for vector in vectors),
                *_levels(None if counted is None else counted[at], None if keep is None else keep[at]),
                None if target is None else target[at],
                None if pulled is None else pulled[at],
                1 / plan.lower.share if plan.lower is not None and self._is_lower(at) else 1.0,
            )
            for at in (slice(0, middle), slice(middle, end))
            if at.start < at.stop
        ]

    def _pulled(self, pull: Pull | None) -> Tensor | None:
        return None if pull is None or pull.mask is None else self._there(pull.mask)


def _levels(counted: Tensor | None, keep: Tensor | None) -> tuple[NDArray[np.float64], Tensor | None]:
    """`StepCounts.levels` and `index` of entries with these numbers of steps. None: no steps."""
    of_trainable = counted if counted is None or keep is None else counted[keep > 0]
    if counted is None or of_trainable is None or not of_trainable.numel():
        return np.zeros(1), None
    if keep is not None:
        counted = torch.where(keep > 0, counted, of_trainable[0])
    levels, index = torch.unique(counted, return_inverse=True)
    found: NDArray[np.float64] = levels.cpu().numpy().astype(np.float64)
    return found, index if found.size > 1 else None


@torch.no_grad()
def step_all(descents: Sequence[GpuDescent], *, move_lower: bool) -> list[float | None]:
    """Take one step of several descents that have equal keys.

    Returns:
        Result of `Descent.step` for each.
    """
    first, moving = descents[0], [one.moving(move_lower=move_lower) for one in descents]
    together = [list(stretches) for stretches in zip(*moving, strict=True)]
    if first.pull_strength is not None:
        for stretches in together:
            _add_pull(stretches, first.pull_strength)
    norms: list[float] = []
    scales = [1.0] * len(descents)
    if first.clip_norm is not None:
        norms = _norms(together, len(descents))
        # a diverged network raises an error later; here it must not spoil the scale
        finite = [norm if math.isfinite(norm) else 0.0 for norm in norms]
        scales = [min(1.0, first.clip_norm / (norm + CLIP_EPS)) for norm in finite]
    for stretches in together:
        _move(first.optimiser, stretches, [scale * stretches[0].times for scale in scales])
    return [*norms] or [None] * len(descents)


def _of_all(tensors: Iterable[Tensor | None]) -> TensorGroup:
    """The tensors as a group. With equal keys, either all are tensors or all are None."""
    return TensorGroup([one for one in tensors if one is not None])


def _add_pull(stretches: Sequence[_Stretch], strength: float) -> None:
    """Add the pull's gradient, strength * (w - target), where it pulls."""
    extra = _of_all(one.weights for one in stretches) - _of_all(one.target for one in stretches)
    extra *= strength
    if stretches[0].pulled is not None:
        extra *= _of_all(one.pulled for one in stretches)
    gradients = _of_all(one.gradient for one in stretches)
    gradients += extra


def _norms(together: Sequence[Sequence[_Stretch]], number: int) -> list[float]:
    """Gradient norm of the moving entries of each network."""
    if not together:
        return [0.0] * number
    squares = torch.zeros(number, device=together[0][0].gradient.device)
    for stretches in together:
        gradients = _masked(_of_all(one.gradient for one in stretches), stretches)
        norms = torch.stack(torch._foreach_norm(gradients.tensors))  # noqa: SLF001 - as torch.nn.utils does
        squares += (norms * stretches[0].times) ** 2
    return [float(norm) for norm in for_numpy(squares.sqrt()).tolist()]


def _masked(values: TensorGroup, stretches: Sequence[_Stretch]) -> TensorGroup:
    """Values with 0 at frozen entries."""
    if stretches[0].keep is None:
        return values
    masked: TensorGroup = values * _of_all(one.keep for one in stretches)
    return masked


def _move(optimiser: Optimiser, stretches: Sequence[_Stretch], scales: Sequence[float]) -> None:
    gradients, weights = (
        _of_all(one.gradient for one in stretches),
        _of_all(one.weights for one in stretches),
    )
    if any(scale != 1 for scale in scales):
        gradients *= list(scales)
    for one in stretches:
        one.num_steps += 1
    indices = [one.index for one in stretches if one.index is not None]
    counts = StepCountsGroup([one.levels + one.num_steps for one in stretches], indices or None)
    vectors = tuple(TensorGroup(own) for own in zip(*(one.vectors for one in stretches), strict=True))
    step = optimiser.step(gradients, weights, vectors, counts, TensorGroup([]))  # type: ignore[arg-type]
    weights -= _masked(step, stretches)  # type: ignore[arg-type]
