"""Measures how far and in which direction each update of a round moves the shared model, and clips it.

The step of an update is its values minus those of the shared model, over the entries that it holds. Its size
is the RMS per sent entry, because a norm grows with the number of entries that a device sends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.combine import Combination
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything

_CHUNK = 2**15  # entries handled at a time; temporary arrays fit into a processor's cache
_ONE_THREAD = 2**13  # OpenBLAS uses one thread for a product of up to 10,000 entries
MOST_SAMPLED = 512  # entries of each update from which its cosine is computed
_SAMPLED_IN_ALL = 2**21  # of all updates of a round together: 8 MB


@dataclass(frozen=True)
class Step:
    """The size of one update's step.

    Attributes:
        rms: root mean square over the sent entries, before clipping.
        factor: share of the step that counts; 1 unless it was clipped.
        counts: False for an update of weight 0.
        cosine: of the angle between the step and the round's median step, entry by entry; None if one of them
            is 0. A mean would follow the longest step, so that honest steps would point against it.
    """

    rms: float
    factor: float
    counts: bool
    cosine: float | None = None


class MeasuredSteps:
    """Measures each update, clips it to a bound, and gives it to another combination.

    Args:
        inner: combines the updates.
        base: the shared model, shape (spec.size,).
        spec: the model.
        num_updates: number of updates to expect.
        bound: largest RMS of a step; None: any.

    Attributes:
        steps: one for each call of `add`, in their order; with cosines after `over`.
    """

    def __init__(
        self,
        inner: Combination,
        base: FlatArray,
        spec: ModelSpec,
        num_updates: int,
        bound: float | None = None,
    ) -> None:
        self._inner, self._base, self._spec, self._bound = inner, base, spec, bound
        self._places = sampled_entries(spec.num_parameters, num_updates)
        self._in_chunks = np.searchsorted(self._places, range(0, spec.num_parameters + _CHUNK, _CHUNK))
        self._base_sample = base[self._places]
        self._samples: list[FlatArray] = []
        self._sent: list[MaskArray] = []
        self._all = np.ones(self._places.size, bool)
        self._scratch = np.empty(_CHUNK, np.float32)
        self._rest = 0.0  # weight of the shared model in place of clipped steps over all entries
        self.steps: list[Step] = []

    def add(self, patch: Patch, weight: float) -> None:
        """Add one patch. `weight` is at least 0, usually the device's number of samples."""
        if isinstance(patch.selection, Everything):
            self._add_whole(patch, weight)
        else:
            self._add_part(patch, weight)

    def _add_whole(self, patch: Patch, weight: float) -> None:
        """Add a patch with all entries.

        One that is clipped to the share c counts with c of its weight, and the shared model with the rest.
        That equals scaling its step, and needs no copy of the update.
        """
        size = self._spec.num_parameters
        base, squares = self._base[:size], 0.0
        for place in range(0, size, _CHUNK):
            part = slice(place, min(place + _CHUNK, size))
            squares += _squared_distance(patch.values[part], base[part], self._scratch)
        sample = patch.values[self._places] - self._base_sample
        factor = self._note(squares, size, weight, sample, self._all)
        self._inner.add(patch, weight if factor == 1 else weight * factor)
        self._rest += weight * (1 - factor)

    def _add_part(self, patch: Patch, weight: float) -> None:
        mask = patch.selection.mask(self._spec)[: self._spec.num_parameters]
        base, squares, start = np.empty_like(patch.values), 0.0, 0
        scratch, sample = self._scratch, np.zeros(self._places.size, np.float32)
        for number, place in enumerate(range(0, mask.size, _CHUNK)):
            inside = np.flatnonzero(mask[place : place + _CHUNK])
            part = slice(start, start + inside.size)
            base[part] = self._base[place : place + _CHUNK][inside]
            squares += _squared_distance(patch.values[part], base[part], scratch)
            wanted = slice(self._in_chunks[number], self._in_chunks[number + 1])
            sample[wanted] = _found(scratch[: inside.size], inside, self._places[wanted] - place)
            start += inside.size
        factor = self._note(squares, base.size, weight, sample, mask[self._places])
        values = patch.values if factor == 1 else base + np.float32(factor) * (patch.values - base)
        self._inner.add(Patch(Entries(mask), values), weight)  # as a bitmap: the mask is not made twice

    def _note(self, squares: float, count: int, weight: float, sample: FlatArray, sent: MaskArray) -> float:
        """Store the figures of one update; return the share of its step that counts."""
        rms = math.sqrt(squares / max(1, count))
        factor = 1.0 if self._bound is None or rms <= self._bound else self._bound / rms
        self.steps.append(Step(rms, factor, weight > 0))
        self._samples.append(sample)
        self._sent.append(sent)
        return factor

    def over(self, previous: FlatArray) -> FlatArray:
        """Return the combined vector, shape (spec.size,); it must be the last call."""
        if self._rest:
            whole = Patch(Everything(), self._base[: self._spec.num_parameters])
            self._inner.add(whole, self._rest)
        if self.steps:
            samples, sent = np.array(self._samples), np.array(self._sent)
            found = _cosines(samples, sent, np.array([step.counts for step in self.steps]))
            self.steps = [replace(step, cosine=one) for step, one in zip(self.steps, found, strict=True)]
            self._samples, self._sent = [], []
        return self._inner.over(previous)


def _squared_distance(values: FlatArray, base: FlatArray, scratch: FlatArray) -> float:
    """Return the sum of squares of `values - base`, and leave that difference in `scratch`.

    BLAS takes at most `_ONE_THREAD` entries at a time, so that the bits do not depend on its threads.
    """
    step = scratch[: values.size]
    squares = 0.0
    with np.errstate(over="ignore", invalid="ignore"):  # then below in float64
        np.subtract(values, base, out=step)
        for place in range(0, step.size, _ONE_THREAD):
            part = step[place : place + _ONE_THREAD]
            squares += float(np.dot(part, part))
    if math.isfinite(squares):
        return squares
    return float(np.square(values.astype(np.float64) - base).sum())


def _found(step: FlatArray, inside: NDArray[np.intp], wanted: NDArray[np.intp]) -> FlatArray:
    """Return the entries of a packed step at these places; 0 where it holds none."""
    if not inside.size:
        return np.zeros(wanted.size, np.float32)
    at = np.minimum(np.searchsorted(inside, wanted), inside.size - 1)
    return np.where(inside[at] == wanted, step[at], np.float32(0))


def _cosines(
    steps: NDArray[np.float32], sent: NDArray[np.bool_], counts: NDArray[np.bool_]
) -> list[float | None]:
    """Return the cosine of each sampled step with the median step, over the entries that were sent.

    Args:
        steps: shape (updates, entries); 0 where an update does not hold the entry.
        sent: the entries that each update holds, same shape.
        counts: updates of which the median is taken, shape (updates,).
    """
    ours, towards = steps.astype(np.float64), _median_step(steps[counts], sent[counts])
    lengths = np.sqrt(np.einsum("ij,ij->i", ours, ours) * (sent @ np.square(towards)))
    known = (lengths > 0) & (lengths < math.inf)
    cosines = np.clip(ours @ towards / np.where(known, lengths, 1.0), -1.0, 1.0)
    return [float(one) if is_known else None for one, is_known in zip(cosines, known, strict=True)]


def _median_step(steps: NDArray[np.float32], sent: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return the median of each entry over the updates that hold it; 0 where none does."""
    towards, some = np.zeros(steps.shape[1]), sent.any(axis=0)
    if sent.all() and len(steps):
        towards[:] = np.median(steps, axis=0)
    elif some.any():
        towards[some] = np.nanmedian(np.where(sent, steps, np.nan)[:, some], axis=0)
    return towards


@lru_cache(maxsize=4)
def sampled_entries(num_parameters: int, num_updates: int) -> NDArray[np.intp]:
    """Return the places from which cosines are computed, ascending; all of a small model."""
    most = max(64, min(MOST_SAMPLED, _SAMPLED_IN_ALL // max(1, num_updates)))
    if num_parameters <= most:
        return np.arange(num_parameters)
    return np.unique((Key.of("cosine").uniform(most) * num_parameters).astype(np.intp))


def typical_rms(steps: Sequence[Step]) -> float | None:
    """Return the median RMS of the steps that count; None if there is none, or it is 0."""
    return median([step.rms for step in steps if step.counts] or [0.0]) or None
