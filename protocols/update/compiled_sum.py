"""Loops that add up updates, compiled by Numba if that is installed (the extra `compiled`).

The bits are those of NumPy: each entry is added separately, in float64. One pass over the vectors replaces
six passes over indices and copies. Threads share the entries, each with a range of its own.
"""

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.one_line import flat

log = logging.getLogger(__name__)

# Entries from which compiling pays: it saves 2 ms an update and costs 0.7 s and 140 MB once.
WORTH_COMPILING = 10**6
_OF_A_THREAD = 2**21  # least entries for a thread; with fewer, starting it takes longer than it saves
_MOST_THREADS = 4  # more threads gain nothing: memory bandwidth is the limit

Sums = NDArray[np.float64]
Weights = NDArray[np.float64] | NDArray[np.uint32]
_Weight = np.float64 | np.uint32
_AddSelected = Callable[[Sums, Weights, MaskArray, FlatArray, float, _Weight], None]
_AddAll = Callable[[Sums, FlatArray, float], None]


@dataclass(frozen=True)
class CompiledSums:
    """The loops, see `CoveredMean.add`; threads share the entries, no two touch the same."""

    selected: _AddSelected
    all: _AddAll

    def add_selected(
        self, sums: Sums, weights: Weights, mask: MaskArray, values: FlatArray, weight: float
    ) -> None:
        """Add `weight * values` to the sums of the masked entries, and `weight` to their weights.

        The type of `weights` must be able to hold the new weights.
        """
        values, starts, one = np.ascontiguousarray(values), [0], weights.dtype.type(weight)
        cuts = _cuts(mask.size)
        for part in cuts[:-1]:
            starts.append(starts[-1] + int(np.count_nonzero(mask[part])))
        _each(
            lambda part, start: self.selected(
                sums[part], weights[part], mask[part], values[start:], float(weight), one
            ),
            cuts,
            starts,
        )

    def add_all(self, sums: Sums, values: FlatArray, weight: float) -> None:
        """Add `weight * values` to `sums`; both have the same shape."""
        values, cuts = np.ascontiguousarray(values), _cuts(sums.size)
        _each(lambda part: self.all(sums[part], values[part], float(weight)), cuts)


def compiled_sums(num_entries: int) -> CompiledSums | None:
    """The compiled loops; None if Numba is not installed or would not pay for so few entries."""
    return _compiled() if num_entries >= WORTH_COMPILING else None


def _cuts(size: int) -> list[slice]:
    """The range of entries of each thread."""
    most = max(1, min(os.cpu_count() or 1, _MOST_THREADS, size // _OF_A_THREAD))
    cuts = [size * part // most for part in range(most + 1)]
    return list(map(slice, cuts, cuts[1:]))


def _each(do: Callable[..., None], *parts: Sequence[object]) -> None:
    if len(parts[0]) == 1:
        do(*(one[0] for one in parts))
        return
    with ThreadPoolExecutor(len(parts[0])) as threads:
        list(threads.map(do, *parts))


@cache
def _compiled() -> CompiledSums | None:
    """Compile the loops; None if Numba is missing or does not work.

    The loops have no branches: the processor would mispredict them on a scattered mask.
    """
    if find_spec("numba") is None:
        return None
    try:
        import numba
    except ImportError as problem:  # some versions of NumPy are not supported
        log.warning("Numba cannot be used, NumPy sums up updates: %s", flat(problem))
        return None

    def add_selected(
        sums: Sums, weights: Weights, mask: MaskArray, values: FlatArray, weight: float, one: _Weight
    ) -> None:
        if not values.size:
            return
        at, last, nothing = 0, values.size - 1, one - one
        for entry in range(mask.size):
            selected = mask[entry]
            value = weight * np.float64(values[min(at, last)])
            sums[entry] += value if selected else 0.0
            weights[entry] += one if selected else nothing
            at += selected

    def add_all(sums: Sums, values: FlatArray, weight: float) -> None:
        for entry in range(sums.size):
            sums[entry] += weight * np.float64(values[entry])

    sums = numba.float64[::1]
    mask, values = (numba.types.Array(kind, 1, "C", readonly=True) for kind in (numba.bool_, numba.float32))
    kinds = [
        numba.void(sums, kind[::1], mask, values, numba.float64, kind)
        for kind in (numba.float64, numba.uint32)
    ]
    compiled = numba.njit(kinds, nogil=True)(add_selected)
    compiled_all = numba.njit(numba.void(sums, values, numba.float64), nogil=True)(add_all)
    return CompiledSums(compiled, compiled_all)
