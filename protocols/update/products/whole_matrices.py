"""Matrix products whose bits depend neither on the number of threads nor on the library.

A linear algebra library adds in an order that depends on its build, the processor and its threads. Sums of
whole numbers below 2^53 are equal in every order. So factors are rounded to few enough bits that their sums
stay below 2^53. This takes float64 about as long as float32 takes without rounding.
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
)  # bits of a large matrix, and of its factor; fewer for a long one
_PANEL = 1 << 16  # entries converted at a time, so that they stay in the processor's cache

Array = NDArray[np.float64]


def product(left: Array, right: Array) -> Array:
    """Matrix product with both factors rounded to about 18 bits; shapes (n, k), (k, m), k up to 2^16."""
    left_whole, left_scale = whole(left, _SMALL)
    right_whole, right_scale = whole(right.T, _SMALL)
    found: Array = left_whole @ right_whole.T
    return found * left_scale * right_scale


def gram(columns: Array) -> Array:
    """Gram matrix columns.T @ columns, shape (k, k)."""
    numbers, scale = whole(columns, min(_SMALL, (_ROOM - len(columns).bit_length()) // 2))
    found: Array = (numbers.T @ numbers) * scale * scale
    return found


def whole(numbers: Array, bits: int) -> tuple[Array, float]:
    """Round to whole numbers of `bits` bits, and return them with the power of 2 that restores the scale."""
    most = max(float(numbers.max(initial=0)), -float(numbers.min(initial=0)))
    exponent = math.frexp(most)[1] - bits
    return np.rint(np.ldexp(numbers, -exponent)), math.ldexp(1.0, exponent)


class WholeMatrix:
    """A float32 matrix, of which one panel at a time is converted to whole numbers.

    Attributes:
        matrix: the matrix, shape (rows, columns), finite.
    """

    def __init__(self, matrix: FlatArray) -> None:
        self.matrix = matrix
        most = max(float(matrix.max()), -float(matrix.min()))
        self._exponent = math.frexp(most)[1] - _LARGE

    def times(self, columns: Array) -> Array:
        """Matrix product matrix @ columns, shape (rows, k)."""
        numbers, scale = self._whole(columns)
        found = np.empty((self.matrix.shape[0], columns.shape[1]))
        for rows, panel in self._panels():
            found[rows] = panel @ numbers
        return found * math.ldexp(scale, self._exponent)

    def transposed_times(self, columns: Array) -> Array:
        """Matrix product matrix.T @ columns, shape (columns, k)."""
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
