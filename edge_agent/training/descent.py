"""The run's optimiser on flat vectors, in place, with frozen entries, a pull and gradient clipping."""

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

BLOCK = 32_768  # 128 kB of each vector, so that all passes over a block find it in the processor's cache
# block size with gradient clipping, which needs two passes: there the cache gains less than the calls cost
_LONG = 2**20
# Up to this share of trainable entries in a block, gathering them and writing them back is no slower.
FEW = 0.25
_NEARLY_ALL = 0.999  # a share that needs a mask

CLIP_EPS = 1e-6  # added to the norm, as in torch.nn.utils.clip_grad_norm_
_ALIKE = StepCounts(np.zeros(1))


@dataclass(frozen=True)
class _Block:
    """A block of consecutive entries, of which at least one is trainable.

    Attributes:
        place: range of the entries in the vectors.
        positions: positions of the trainable entries in the block, if these are few. Else None.
        keep: all bits set at trainable entries; None if all entries are trainable, or `positions` names them.
        vectors: the optimiser's vectors, at `positions` only if these are given. Otherwise whole vectors that
            `state` returns; it restores their frozen entries at the end.
        counts: steps that these entries had taken before this descent.
        lower: True if the block belongs to the lower layers, which train in only a share of the steps.
    """

    place: slice
    positions: NDArray[np.uint16] | None
    keep: NDArray[np.int8] | None
    vectors: tuple[Floats, ...]
    counts: StepCounts
    lower: bool


@dataclass(frozen=True)
class OptimiserFootprint:
    """How many numbers an optimiser stores.

    Attributes:
        per_trained: numbers for each trained entry during a round.
        per_stored: numbers for every entry, stored from round to round.
    """

    per_trained: int = 0
    per_stored: int = 0

    def copies(self, trainable_share: float) -> float:
        """Return the memory of a `Descent` and its initial state, in float32 copies of the model.

        Args:
            trainable_share: share of trainable entries in each block.
        """
        if trainable_share <= FEW:  # positions take half as much memory as the entries
            return trainable_share * (self.per_trained + 0.5) + 2 * self.per_stored
        working = (
            0 if self.per_stored else self.per_trained
        )  # the optimiser works in the vectors that it keeps
        return working + (0.25 if trainable_share < 1 else 0.0) + 2 * self.per_stored

    def most_copies(self, trainable_share: float) -> float:
        """Return the largest `copies` of all shares up to this one.

        Without a mask, or where the optimiser works in the stored vectors, a larger share takes less.
        """
        shares = (trainable_share, min(trainable_share, FEW), min(trainable_share, _NEARLY_ALL))
        return max(map(self.copies, shares))


def optimiser_footprint(settings: TrainingSection) -> OptimiserFootprint:
    """Return the footprint of the optimiser of a [training] section."""
    optimiser = optimiser_of(settings)
    number = optimiser.num_vectors
    stored = number + optimiser.counts_steps if settings.optimiser_state == "device" else 0
    return OptimiserFootprint(number, stored)


class Descent:
    """Moves the trainable entries by the optimiser, along the clipped gradient of loss and pull.

    The vectors are processed block by block. So no memory is needed beyond the optimiser's own, and each
    block passes through the processor's cache once, or twice with gradient clipping. Blocks without trainable
    entries are skipped, and the optimiser stores nothing for them. In blocks with few trainable entries only
    these are processed.

    Args:
        weights: w, changed by each step, shape (n,). Running statistics behind the parameters stay unchanged.
        gradient: g, to be filled before each step, which overwrites it. Same shape and type.
        size: n, number of parameters.
        settings: the run's [training] section.
        plan: trainable entries, lower layers and pull.
        before: the optimiser's state of earlier rounds, which stays unchanged; None if the optimiser starts
            without a state, and `state` must not be called.
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
        self._before, self._stored = before, None if before is None else self._copied(before, size)
        lower = plan.lower
        self._lower_stop, self._lower_times = (0, 1.0) if lower is None else (lower.stop, 1 / lower.share)
        passes_twice = not (self._optimiser.num_vectors or settings.weight_decay or plan.pull)
        self._length = _LONG if passes_twice and plan.trainable is None and not self._clip_norm else BLOCK
        self._blocks = list(self._all_blocks(size, plan.trainable))
        self._upper_blocks = [block for block in self._blocks if not block.lower]
        self._num_steps = self._num_lower_steps = 0

    def step(self, *, move_lower: bool = True) -> float | None:
        """Move the trainable weights. Overwrites the gradient.

        Args:
            move_lower: True moves the lower layers too, see `LowerLayers`.

        Returns:
            Norm of the gradient before clipping, over all moving entries and with the pull. If it is not
            finite, nothing has moved; None if the gradient is not clipped.
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
        """Return the factor on a block's gradient. Lower layers move in fewer steps, so their gradient counts
        more.
        """
        return self._lower_times if block.lower else 1.0

    def _num_steps_of(self, block: _Block) -> int:
        return self._num_lower_steps if block.lower else self._num_steps

    def state(self) -> OptimiserState:
        """Return the optimiser's state, with the earlier values at frozen entries.

        Call it once, at the end.
        """
        assert self._before is not None, "state() needs an optimiser that was given its earlier state"
        assert self._stored is not None, "likewise"
        for block in self._blocks:
            for number, new in enumerate(block.vectors):
                stored = self._stored.vectors[number][block.place]
                if block.positions is not None:
                    stored[block.positions.astype(np.intp)] = new
                elif block.keep is not None:
                    before = self._before.vectors[number][block.place] if self._before.vectors else 0
                    np.copyto(stored, before, where=block.keep == 0)
            if self._optimiser.counts_steps:
                self._stored.vectors[-1][block.place] += self._steps_taken(block)
        return self._stored

    def _steps_taken(self, block: _Block) -> Floats:
        """Return how many steps each entry of a block has taken in this descent."""
        taken = np.zeros(block.place.stop - block.place.start, np.float32)
        if block.positions is not None:
            taken[block.positions.astype(np.intp)] = self._num_steps_of(block)
        else:
            taken[slice(None) if block.keep is None else block.keep != 0] = self._num_steps_of(block)
        return taken

    def _copied(self, before: OptimiserState, size: int) -> OptimiserState:
        """Return a copy of the state to write to, with zeros if nothing is stored yet."""
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
        """Describe a block. `trainable` is None if no entry is frozen."""
        length, lower = place.stop - place.start, place.stop <= self._lower_stop
        if trainable is None:
            block = _Block(place, None, None, (), _ALIKE, lower)
        elif (positions := np.flatnonzero(trainable)).size <= FEW * length:
            block = _Block(place, positions.astype(np.uint16), None, (), _ALIKE, lower)
            length = positions.size
        else:
            block = _Block(place, None, _bits(trainable), (), _ALIKE, lower)
        number = self._optimiser.num_vectors
        if self._stored is None:
            return replace(block, vectors=tuple(np.zeros(length, self._weights.dtype) for _ in range(number)))
        remembered = [vector[place] for vector in self._stored.vectors]
        vectors = [_few(vector, block) for vector in remembered[:number]]
        counts = _counts(remembered[-1], trainable, block) if self._optimiser.counts_steps else _ALIKE
        return replace(block, vectors=tuple(vectors), counts=counts)

    def _square_sum(self, block: _Block) -> float:
        """Add the pull to the gradient and return the squared norm of the trainable entries."""
        if self._pull is not None:
            self._add_pull(block.place, self._pull)
        gradient = _few(self._gradient[block.place], block)
        squares = np.multiply(gradient, gradient, out=self._scratch[: gradient.size])
        if block.keep is not None:
            _clear(squares, block.keep)
        return float(squares.sum(dtype=np.float64))

    def _add_pull(self, place: slice, pull: Pull) -> None:
        """Add the pull's gradient, 2 * strength * (w - target), at the pulled entries."""
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
    """Return the step counts of a block whose entries have taken `taken` steps."""
    levels = np.unique(taken if trainable is None else taken[trainable])
    if levels.size == 1:
        return StepCounts(levels.astype(np.float64))
    levels, index = np.unique(_few(taken, block), return_inverse=True)
    return StepCounts(levels.astype(np.float64), index.astype(np.uint16))


def _few(values: Floats, block: _Block) -> Floats:
    """Return the values of a block; if few entries are trainable, a new array of only these."""
    return values if block.positions is None else values.take(block.positions.astype(np.intp))


def _bits(mask: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Return an array with all bits set where the mask is True."""
    return np.negative(mask.view(np.int8))


def _clear(values: Floats, keep: NDArray[np.int8]) -> None:
    """Set values to exactly 0 where `keep` has no bits.

    Unlike a product this also clears NaN, and on a scattered mask it is 30 times faster than
    `np.copyto(values, 0, where=...)`.
    """
    bits = values.view(f"i{values.itemsize}")
    np.bitwise_and(bits, keep, out=bits)
