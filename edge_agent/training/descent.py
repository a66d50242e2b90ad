"""The run's optimiser at work on flat vectors: in place, with frozen entries, a pull and clipping."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.optimisers import optimiser_of
from fleetune.edge_agent.training.optimisers.optimiser import Floats, OptimiserState, StepCounts
from fleetune.protocols.method.trainer import FitPlan, Pull
from fleetune.protocols.model.spec import MaskArray
from fleetune.protocols.settings.device import TrainingSection

BLOCK = 32_768  # entries: 128 kB a vector, so that all passes over a block find it in the cache
_LONG = 2**20  # entries of a block where there are two passes, which gain less by the cache than calls cost
FEW = 0.25  # share of a block's entries: up to it, taking them out and putting them back is no slower

CLIP_EPS = 1e-6  # beside the norm, as in torch.nn.utils.clip_grad_norm_
_ALIKE = StepCounts(np.zeros(1))


@dataclass(frozen=True)
class _Block:
    """Some consecutive entries, at least one of them trainable.

    Attributes:
        place: where they stand.
        positions: of the trainable ones within the block, where these are few; else None.
        keep: all bits set where trainable; None: all are, or `positions` says which.
        vectors: the optimiser's, of the `positions` alone where there are any; else those that are to be
            kept, whose frozen entries are put back at the end.
        counts: of the steps that these entries had taken before.
        lower: whether they are the lower layers' that train in a share of the steps only.
    """

    place: slice
    positions: NDArray[np.uint16] | None
    keep: NDArray[np.int8] | None
    vectors: tuple[Floats, ...]
    counts: StepCounts
    lower: bool


@dataclass(frozen=True)
class OptimiserFootprint:
    """How much an optimiser remembers, in numbers.

    Attributes:
        per_trained: of each trained entry while it works.
        per_kept: of every entry, from round to round.
    """

    per_trained: int = 0
    per_kept: int = 0

    def copies(self, trainable_share: float) -> float:
        """What a `Descent` holds, in float32 copies of the model, where this share of each block is
        trainable; and the state that it began with.
        """
        if trainable_share <= FEW:  # positions take half as much as the entries
            return trainable_share * (self.per_trained + 0.5) + 2 * self.per_kept
        working = 0 if self.per_kept else self.per_trained  # it works in what it will keep
        return working + (0.25 if trainable_share < 1 else 0.0) + 2 * self.per_kept


def optimiser_footprint(settings: TrainingSection) -> OptimiserFootprint:
    """In a run with this [training] section."""
    optimiser = optimiser_of(settings)
    number = optimiser.num_vectors
    kept = number + optimiser.counts_steps if settings.optimiser_state == "device" else 0
    return OptimiserFootprint(number, kept)


class Descent:
    """The optimiser's steps where trainable, by the gradient and the pull's, clipped.

    It goes block by block: no memory beyond the optimiser's, and a block passes through the cache once,
    however many terms there are (twice where the gradient is clipped). Blocks without a trainable entry are
    skipped and nothing is remembered of them; in those with few trainable entries only of these.

    Args:
        weights: w, changed by each step; shape (n,), or longer than n (statistics, left alone).
        gradient: g, to be filled before each step, which uses it up; same shape and dtype.
        size: n, the number of parameters.
        settings: the run's [training] section.
        plan: trainable, lower layers and pull.
        before: what the optimiser remembers from earlier, left alone; `state` will be asked for. None: it
            begins with nothing and keeps nothing.
    """

    def __init__(
        self,
        weights: Floats,
        gradient: Floats,
        size: int,
        settings: TrainingSection,
        plan: FitPlan,
        before: OptimiserState | None = None,
    ) -> None:
        self._weights, self._gradient, self._pull = weights, gradient, plan.pull
        self._optimiser, self._clip_norm = optimiser_of(settings), settings.clip_norm
        self._scratch = np.empty(min(BLOCK, size), weights.dtype)
        self._before, self._kept = before, None if before is None else self._copied(before, size)
        lower = plan.lower
        self._lower_stop, self._lower_times = (0, 1.0) if lower is None else (lower.stop, 1 / lower.share)
        passes_twice = not (self._optimiser.num_vectors or settings.weight_decay or plan.pull)
        self._length = _LONG if passes_twice and plan.trainable is None and not self._clip_norm else BLOCK
        self._blocks = list(self._all_blocks(size, plan.trainable))
        self._upper_blocks = [block for block in self._blocks if not block.lower]
        self._num_steps = self._num_lower_steps = 0

    def step(self, *, move_lower: bool = True) -> float | None:
        """Move the trainable weights. Uses the gradient up.

        move_lower: whether those of lower layers move too, see `LowerLayers`.

        Returns:
            The norm of the gradient of what moves, the pull's included, before it is clipped; where it
            is not finite nothing has moved. None: it is not clipped.
        """
        norm, scale, moving = None, 1.0, self._blocks if move_lower else self._upper_blocks
        if self._clip_norm is not None:
            norm = math.sqrt(
                sum(self._gradient_scale(block) ** 2 * self._square_sum(block) for block in moving)
            )
            if not math.isfinite(norm):
                return norm
            scale = min(1.0, self._clip_norm / (norm + CLIP_EPS))
        self._num_steps += 1
        self._num_lower_steps += move_lower
        for block in moving:
            if norm is None and self._pull is not None:
                self._add_pull(block.place, self._pull)
            self._move(block, scale * self._gradient_scale(block))
        return norm

    def _gradient_scale(self, block: _Block) -> float:
        """How many times its gradient counts."""
        return self._lower_times if block.lower else 1.0

    def _num_steps_of(self, block: _Block) -> int:
        return self._num_lower_steps if block.lower else self._num_steps

    def state(self) -> OptimiserState:
        """What the optimiser remembers now, and of frozen entries from before. Asked once, at the end."""
        assert self._before is not None, "it was told what is remembered from before"
        assert self._kept is not None, "likewise"
        for block in self._blocks:
            for number, new in enumerate(block.vectors):
                kept = self._kept.vectors[number][block.place]
                if block.positions is not None:
                    kept[block.positions.astype(np.intp)] = new
                elif block.keep is not None:
                    before = self._before.vectors[number][block.place] if self._before.vectors else 0
                    np.copyto(kept, before, where=block.keep == 0)
            if self._optimiser.counts_steps:
                self._kept.vectors[-1][block.place] += self._steps_taken(block)
        return self._kept

    def _steps_taken(self, block: _Block) -> Floats:
        """By each entry of a block in this descent."""
        taken = np.zeros(block.place.stop - block.place.start, np.float32)
        if block.positions is not None:
            taken[block.positions.astype(np.intp)] = self._num_steps_of(block)
        else:
            taken[slice(None) if block.keep is None else block.keep != 0] = self._num_steps_of(block)
        return taken

    def _copied(self, before: OptimiserState, size: int) -> OptimiserState:
        """To be written to; zeros where nothing is remembered."""
        number = self._optimiser.num_vectors + self._optimiser.counts_steps
        if before.vectors:
            assert [vector.shape for vector in before.vectors] == [(size,)] * number, "of this optimiser"
            return OptimiserState(tuple(vector.copy() for vector in before.vectors))
        return OptimiserState(tuple(np.zeros(size, np.float32) for _ in range(number)))

    def _all_blocks(self, size: int, trainable: MaskArray | None) -> Iterator[_Block]:
        middle = min(self._lower_stop, size)
        for begin, end in ((0, middle), (middle, size)):
            for start in range(begin, end, self._length):
                place = slice(start, min(start + self._length, end))
                mask = None if trainable is None else trainable[place]
                if mask is None or mask.any():
                    yield self._block(place, None if mask is None or mask.all() else mask)

    def _block(self, place: slice, trainable: MaskArray | None) -> _Block:
        """Where None are frozen `trainable` is None."""
        length, lower = place.stop - place.start, place.stop <= self._lower_stop
        if trainable is None:
            block = _Block(place, None, None, (), _ALIKE, lower)
        elif (positions := np.flatnonzero(trainable)).size <= FEW * length:
            block = _Block(place, positions.astype(np.uint16), None, (), _ALIKE, lower)
            length = positions.size
        else:
            block = _Block(place, None, _bits(trainable), (), _ALIKE, lower)
        number = self._optimiser.num_vectors
        if self._kept is None:
            return replace(block, vectors=tuple(np.zeros(length, self._weights.dtype) for _ in range(number)))
        remembered = [vector[place] for vector in self._kept.vectors]
        vectors = [_few(vector, block) for vector in remembered[:number]]
        counts = _counts(remembered[-1], trainable, block) if self._optimiser.counts_steps else _ALIKE
        return replace(block, vectors=tuple(vectors), counts=counts)

    def _square_sum(self, block: _Block) -> float:
        """Of the trainable entries' gradient; adds the pull's."""
        if self._pull is not None:
            self._add_pull(block.place, self._pull)
        gradient = _few(self._gradient[block.place], block)
        squares = np.multiply(gradient, gradient, out=self._scratch[: gradient.size])
        if block.keep is not None:
            _clear(squares, block.keep)
        return float(squares.sum(dtype=np.float64))

    def _add_pull(self, place: slice, pull: Pull) -> None:
        """2 * strength * (w - target) where pulled."""
        gradient = self._gradient[place]
        extra = self._scratch[: gradient.size]
        np.subtract(self._weights[place], pull.target[place], out=extra)
        extra *= 2 * pull.strength
        if pull.mask is not None:
            _clear(extra, _bits(pull.mask[place]))
        gradient += extra

    def _move(self, block: _Block, scale: float) -> None:
        weights, gradient = self._weights[block.place], self._gradient[block.place]
        if block.positions is None:
            step = self._step_of(block, gradient, weights, scale)
            if block.keep is not None:
                _clear(step, block.keep)
            np.subtract(weights, step, out=weights)
        else:
            at = block.positions.astype(np.intp)
            some = weights.take(at)
            weights[at] = some - self._step_of(block, gradient.take(at), some, scale)

    def _step_of(self, block: _Block, gradient: Floats, weights: Floats, scale: float) -> Floats:
        if scale != 1:
            gradient *= scale
        counts = block.counts
        if self._optimiser.counts_steps:
            counts = StepCounts(counts.levels + self._num_steps_of(block), counts.index)
        return self._optimiser.step(gradient, weights, block.vectors, counts, self._scratch[: gradient.size])


def _counts(taken: Floats, trainable: MaskArray | None, block: _Block) -> StepCounts:
    """Of a block whose entries have `taken` these numbers of steps."""
    levels = np.unique(taken if trainable is None else taken[trainable])
    if levels.size == 1:
        return StepCounts(levels.astype(np.float64))
    levels, index = np.unique(_few(taken, block), return_inverse=True)
    return StepCounts(levels.astype(np.float64), index.astype(np.uint16))


def _few(values: Floats, block: _Block) -> Floats:
    """A block's values; a new array of the trainable ones' where these are few."""
    return values if block.positions is None else values.take(block.positions.astype(np.intp))


def _bits(mask: NDArray[np.bool_]) -> NDArray[np.int8]:
    """All bits set where True."""
    return np.negative(mask.view(np.int8))


def _clear(values: Floats, keep: NDArray[np.int8]) -> None:
    """Exactly 0 where `keep` has no bits, whatever was there: unlike a product this also clears NaN, and
    on a scattered mask it is 30 times as fast as `np.copyto(values, 0, where=...)`.
    """
    bits = values.view(f"i{values.itemsize}")
    np.bitwise_and(bits, keep, out=bits)
