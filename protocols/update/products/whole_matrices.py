"""Products of matrices whose bits depend neither on how many threads multiply nor on the library.

A linear algebra library adds up in an order that depends on its build, on the processor and on its threads.
Sums of whole numbers below 2^53 are the same in any order: so what is multiplied is rounded to as many bits
as leave that room. float64 then is about as fast as float32 would be without.
"""

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray

_ROOM = 52  # bits of a sum
_LARGE, _SMALL = (
    21,
    18,
)  # bits of a large matrix, and of those that it is multiplied by, less where it is long
_PANEL = 1 << 16  # entries that are looked at at a time: they stay in a processor's cache

Array = NDArray[np.float64]


def product(left: Array, right: Array) -> Array:
    """The matrix product, each told by about 18 bits; shapes (n, k), (k, m), k up to 2^16."""
    left_whole, left_scale = whole(left, _SMALL)
    right_whole, right_scale = whole(right.T, _SMALL)
    found: Array = left_whole @ right_whole.T
    return found * left_scale * right_scale


def gram(columns: Array) -> Array:
    """columns.T @ columns, shape (k, k)."""
    numbers, scale = whole(columns, min(_SMALL, (_ROOM - len(columns).bit_length()) // 2))
    found: Array = (numbers.T @ numbers) * scale * scale
    return found


def whole(numbers: Array, bits: int) -> tuple[Array, float]:
    """Whole numbers of so many bits, and the power of 2 by which they are to be multiplied."""
    most = max(float(numbers.max(initial=0)), -float(numbers.min(initial=0)))
    exponent = math.frexp(most)[1] - bits
    return np.rint(np.ldexp(numbers, -exponent)), math.ldexp(1.0, exponent)


class WholeMatrix:
    """A matrix of float32, of which a panel at a time is made whole numbers.

    Attributes:
        matrix: shape (rows, columns), finite.
    """

    def __init__(self, matrix: FlatArray) -> None:
        self.matrix = matrix
        most = max(float(matrix.max()), -float(matrix.min()))
        self._exponent = math.frexp(most)[1] - _LARGE

    def times(self, columns: Array) -> Array:
        """Matrix @ columns, shape (rows, k)."""
        numbers, scale = self._whole(columns)
        found = np.empty((self.matrix.shape[0], columns.shape[1]))
        for rows, panel in self._panels():
            found[rows] = panel @ numbers
        return found * math.ldexp(scale, self._exponent)

    def transposed_times(self, columns: Array) -> Array:
        """matrix.T @ columns, shape (columns, k)."""
        numbers, scale = self._whole(columns)
        found = np.zeros((self.matrix.shape[1], columns.shape[1]))
        for rows, panel in self._panels():
            found += panel.T @ numbers[rows]
        return found * math.ldexp(scale, self._exponent)

    def _whole(self, columns: Array) -> tuple[Array, float]:
        return whole(columns, min(_SMALL, _ROOM - _LARGE - len(columns).bit_length()))

    def _panels(self) -> Iterator[tuple[slice, Array]]:
        rows, columns = self.matrix.shape
        at_a_time = max(1, _PANEL // columns)
        factor = np.float32(math.ldexp(1.0, -self._exponent))
        for start in range(0, rows, at_a_time):
            here = slice(start, min(start + at_a_time, rows))
            yield here, np.rint(self.matrix[here] * factor).astype(np.float64)
