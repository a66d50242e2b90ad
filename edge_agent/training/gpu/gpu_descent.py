"""The run's optimiser on a GPU.

It takes the same steps as `edge_agent.training.descent`, in the same order. Without clipping the results are
equal to the bit, provided that the GPU computes each operation alike. A step is a few operators on all
entries; frozen entries move by 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray
from torch import Tensor

from fleetune.edge_agent.training.descent import CLIP_EPS
from fleetune.edge_agent.training.gpu.flat_vectors import FlatVectors
from fleetune.edge_agent.training.gpu.torch_device import for_numpy
from fleetune.edge_agent.training.optimisers import optimiser_of
from fleetune.edge_agent.training.optimisers.optimiser import Optimiser, OptimiserState
from fleetune.protocols.method.trainer import FitPlan, Pull
from fleetune.protocols.settings.device import TrainingSection

_NAMES = {np.add: "add", np.subtract: "sub", np.multiply: "mul", np.true_divide: "div", np.sqrt: "sqrt"}


class NumpyTensor(NDArrayOperatorsMixin):
    """A tensor that numpy's functions process by torch.

    So optimisers written with numpy run on a GPU as they do on the processor. A function that writes to its
    first argument writes in place. Any other output becomes a new tensor.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __array_ufunc__(self, function: np.ufunc, method: str, *given: Any, out: tuple[Any, ...] = ()) -> Any:
        if method != "__call__" or function not in _NAMES or not isinstance(given[0], NumpyTensor):
            return NotImplemented
        first, others = given[0], [[one.tensor] if isinstance(one, NumpyTensor) else one for one in given[1:]]
        name, in_place = _NAMES[function], bool(out) and out[0] is first
        # `_foreach_div` divides by a number; a GPU's `div` multiplies by its rounded reciprocal
        found = getattr(torch, f"_foreach_{name}{'_' if in_place else ''}")([first.tensor], *others)
        if in_place:
            return first
        if not out:
            return NumpyTensor(found[0])
        out[0].tensor = found[0]
        return out[0]


class TensorStepCounts:
    """Step counts of entries on the GPU, see `StepCounts`.

    Args:
        levels: the different numbers, this step included.
        index: index into `levels` of each entry; None if all entries have the same number.
    """

    def __init__(self, levels: NDArray[np.float64], index: Tensor | None) -> None:
        self._levels, self._index = levels, index

    def each(self, value: Callable[[NDArray[np.float64]], NDArray[np.float64]], dtype: np.dtype[Any]) -> Any:
        """Return `value` of each entry's number of steps, see `StepCounts.each`."""
        values = value(self._levels)
        if self._index is None:
            return float(values[0])
        return NumpyTensor(torch.from_numpy(values.astype(dtype)).to(self._index.device)[self._index])


@dataclass
class _Stretch:
    """Consecutive entries on the GPU that take the same steps.

    Attributes:
        place: range of the entries.
        weights, gradient: tensors of these entries.
        keep: 1 where trainable, else 0; None if all are trainable.
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


class GpuDescent:
    """An optimiser on the GPU, with the interface of `edge_agent.training.descent.Descent`.

    Args:
        flat_vectors: vectors on the GPU with weights and gradient, which stay there from now on.
        size, settings, plan, before: see `Descent`.
    """

    def __init__(
        self,
        flat_vectors: FlatVectors,
        size: int,
        settings: TrainingSection,
        plan: FitPlan,
        before: OptimiserState | None,
    ) -> None:
        flat_vectors.keep_on_gpu()
        self._vectors, self._size, self._plan, self._before = flat_vectors, size, plan, before
        self.optimiser, self.clip_norm = optimiser_of(settings), settings.clip_norm
        self.pull_strength = None if plan.pull is None else 2 * plan.pull.strength
        self._stretches = self._all_stretches(plan)

    @torch.no_grad()
    def step(self, *, move_lower: bool = True) -> float | None:
        """Move the trainable weights, see `Descent.step`."""
        moving = [one for one in self._stretches if move_lower or not self._is_lower(one.place)]
        if self.pull_strength is not None:
            for stretch in moving:
                _add_pull(stretch, self.pull_strength)
        norm, scale = None, 1.0
        if self.clip_norm is not None:
            norm = self._norm(moving)
            # a diverged network raises an error later; here it must not spoil the scale
            scale = min(1.0, self.clip_norm / ((norm if math.isfinite(norm) else 0.0) + CLIP_EPS))
        for stretch in moving:
            _move(self.optimiser, stretch, scale * stretch.times)
        return norm

    def state(self) -> OptimiserState:
        """Return the optimiser's state, see `Descent.state`."""
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

    def _norm(self, stretches: Sequence[_Stretch]) -> float:
        """Return the gradient norm of the moving entries."""
        square = torch.zeros(1, device=self._vectors.torch_gradient.device)
        for stretch in stretches:
            gradient = _masked(NumpyTensor(stretch.gradient), stretch).tensor
            (norm,) = torch._foreach_norm([gradient])  # noqa: SLF001 - as torch.nn.utils does
            square += (norm * stretch.times) ** 2
        return for_numpy(square.sqrt()).item()

    def _is_lower(self, place: slice) -> bool:
        return self._plan.lower is not None and place.stop <= self._vectors.torch_stop(self._plan.lower.stop)

    def _there(self, vector: NDArray[Any]) -> Tensor:
        """Return the parameters' entries of a flat vector in the GPU's layout, and 0 elsewhere."""
        whole = torch.zeros(len(self._vectors.weights))
        whole[: self._size] = torch.from_numpy(vector[: self._size].astype(np.float32))
        return self._vectors.to_torch(whole.to(self._vectors.torch_weights.device))

    def _back(self, stretches: Sequence[Tensor]) -> NDArray[np.float32]:
        """Return a flat vector of the parameters, from the values of the stretches."""
        whole = torch.zeros(self._vectors.torch_size, device=self._vectors.torch_weights.device)
        for stretch, values in zip(self._stretches, stretches, strict=True):
            whole[stretch.place] = values
        found: NDArray[np.float32] = self._vectors.from_torch(whole)[: self._size].cpu().numpy()
        return found

    def _all_stretches(self, plan: FitPlan) -> list[_Stretch]:
        end = self._vectors.torch_stop(self._size)
        middle = 0 if plan.lower is None else min(end, self._vectors.torch_stop(plan.lower.stop))
        keep = None if plan.trainable is None else self._there(plan.trainable)
        target = None if plan.pull is None else self._there(plan.pull.target)
        pulled = self._pulled(plan.pull)
        remembered = [] if self._before is None else [self._there(one) for one in self._before.vectors]
        weights, gradient = self._vectors.torch_weights, self._vectors.torch_gradient
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
    """Return `StepCounts.levels` and `index` of entries with these numbers of steps; None for no steps."""
    of_trainable = counted if counted is None or keep is None else counted[keep > 0]
    if counted is None or of_trainable is None or not of_trainable.numel():
        return np.zeros(1), None
    if keep is not None:
        counted = torch.where(keep > 0, counted, of_trainable[0])
    levels, index = torch.unique(counted, return_inverse=True)
    found: NDArray[np.float64] = levels.cpu().numpy().astype(np.float64)
    return found, index if found.size > 1 else None


def _add_pull(stretch: _Stretch, strength: float) -> None:
    """Add the pull's gradient, strength * (w - target), where it pulls."""
    assert stretch.target is not None
    extra = NumpyTensor(stretch.weights) - NumpyTensor(stretch.target)
    extra *= strength
    if stretch.pulled is not None:
        extra *= NumpyTensor(stretch.pulled)
    gradient = NumpyTensor(stretch.gradient)
    gradient += extra


def _masked(values: NumpyTensor, stretch: _Stretch) -> NumpyTensor:
    """Return the values with 0 at frozen entries."""
    if stretch.keep is None:
        return values
    masked: NumpyTensor = values * NumpyTensor(stretch.keep)
    return masked


def _move(optimiser: Optimiser, stretch: _Stretch, scale: float) -> None:
    gradient, weights = NumpyTensor(stretch.gradient), NumpyTensor(stretch.weights)
    if scale != 1:
        gradient *= scale
    stretch.num_steps += 1
    counts = TensorStepCounts(stretch.levels + stretch.num_steps, stretch.index)
    vectors = tuple(NumpyTensor(one) for one in stretch.vectors)
    scratch = NumpyTensor(torch.empty(0))
    step = optimiser.step(gradient, weights, vectors, counts, scratch)  # type: ignore[arg-type]
    weights -= _masked(step, stretch)  # type: ignore[arg-type]
