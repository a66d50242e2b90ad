"""Approximates a matrix of changes by a sum of few outer products of integers, and finds these products.

Training changes a layer by a sum of outer products: the change of each neuron, times its inputs. A few of
them have most of the energy. In the first layer of an MLP on UCI HAR (one device, rounds 2 to 40), four of 64
have 0.85 to 0.92 of it. Two, with half as many numbers, have 0.68 to 0.82. Bytes: docs/wire.md, `lowrank`,
*Products*.

Search. Many products are found at a time. A few passes over the matrix find the directions with the most
energy. This is a randomised range finder (Halko, Martinsson and Tropp 2011, arXiv:0909.4061) with one and a
half power iterations, three if much remains, and 8 spare columns. The directions are rotated to those of the
matrix (Rayleigh and Ritz), largest first. The shorter factors are rounded first. The longer factors are then
the best fit, jointly, to the rounded ones. If more products pay off, the search repeats with the remainder.

If only some entries of a matrix are sent, products are fitted to these, one after the other (alternating
least squares). This works as well: for two of three entries of a layer of LeNet-5 (SRP-pFed), products take a
third of the bytes of single entries.

Matrix products have the same bits on every machine. A linear algebra library adds in an order that depends on
its build, the processor and its threads. Sums of whole numbers below 2^53 are equal in every order. So
factors are rounded to few enough bits that their sums stay below 2^53. This takes float64 about as long as
float32 takes without rounding. The eigenvectors do come from such a library, but their matrices are so small
that it uses one thread.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.entropy.octaves import Ints
from fleetune.protocols.update.entropy.small_integers import LARGEST

MAX_PRODUCTS = 255
MAX_OCTAVES = 14
_UPWARD = 0.4  # share of a step, less than a half: a number near 0 costs more bytes than it gains
_ENTRIES, _PRODUCTS = 1 << 16, 32  # entries of the sum that are computed at a time

Matrix = NDArray[np.float32]
Steps = NDArray[np.float64]


@dataclass(frozen=True)
class Product:
    """One outer product: 2^-octaves times `left` by `right`, in steps.

    Attributes:
        octaves: about log2 of its norm in steps, 0 to MAX_OCTAVES.
        left, right: integers from -LARGEST to LARGEST, int16, shapes (rows,) and (columns,).
    """

    octaves: int
    left: Ints
    right: Ints

    @property
    def square(self) -> float:
        """Square of the norm, in squared steps."""
        left, right = (float(np.square(one, dtype=np.int64).sum()) for one in (self.left, self.right))
        return math.ldexp(left * right, -2 * self.octaves)


def rounded_down(vector: FlatArray) -> Ints:
    """Round to whole numbers, towards 0 if the fraction is below 0.6."""
    sizes = np.abs(vector)
    sizes += np.float32(_UPWARD)
    np.minimum(np.floor(sizes, out=sizes), np.float32(LARGEST), out=sizes)
    return np.copysign(sizes, vector, out=sizes).astype(np.int16)


def sum_of(products: list[Product], rows: int, columns: int) -> Iterator[tuple[slice, Steps]]:
    """Yield the sum of the products in steps, in parts: a range of entries, counted row by row, and their
    values.

    All terms are multiples of 2^-MAX_OCTAVES and take less than 53 bits. So every order of addition, and
    every library, gives the same result.
    """
    left, right = np.stack([one.left for one in products], 1), np.stack([one.right for one in products])
    octaves = np.array([one.octaves for one in products])
    at_a_time = max(1, _ENTRIES // columns)
    for start in range(0, rows, at_a_time):
        here = left[start : start + at_a_time]
        part: Steps | None = None
        for first in range(0, len(products), _PRODUCTS):
            some = slice(first, first + _PRODUCTS)
            scaled = np.ldexp(here[:, some].astype(np.float64), -octaves[some])
            these = scaled @ right[some].astype(np.float64)
            part = these if part is None else np.add(part, these, out=part)
        assert part is not None  # there is at least one product
        yield slice(start * columns, start * columns + part.size), part.reshape(-1)


_ROOM = 52  # bits of a sum
# bits of a large matrix, and of its factor; fewer for a long one
_LARGE, _SMALL = 21, 18
_PANEL = 1 << 16  # entries converted at a time, so that they stay in the processor's cache

Array = NDArray[np.float64]


def product(left: Array, right: Array) -> Array:
    """Return the matrix product with both factors rounded to about 18 bits; shapes (n, k), (k, m), k up to
    2^16.
    """
    left_whole, left_scale = whole(left, _SMALL)
    right_whole, right_scale = whole(right.T, _SMALL)
    found: Array = left_whole @ right_whole.T
    return found * left_scale * right_scale


def gram(columns: Array) -> Array:
    """Return the Gram matrix columns.T @ columns, shape (k, k)."""
    numbers, scale = whole(columns, min(_SMALL, (_ROOM - len(columns).bit_length()) // 2))
    found: Array = (numbers.T @ numbers) * scale * scale
    return found


def whole(numbers: Array, bits: int) -> tuple[Array, float]:
    """Round to whole numbers of `bits` bits; return them with the power of 2 that restores the scale."""
    most = max(float(numbers.max(initial=0)), -float(numbers.min(initial=0)))
    exponent = math.frexp(most)[1] - bits
    return np.rint(np.ldexp(numbers, -exponent)), math.ldexp(1.0, exponent)


class WholeMatrix:
    """A float32 matrix whose products are exact: one panel at a time is converted to whole numbers.

    Attributes:
        matrix: the matrix, shape (rows, columns), finite.
    """

    def __init__(self, matrix: FlatArray) -> None:
        self.matrix = matrix
        most = max(float(matrix.max()), -float(matrix.min()))
        self._exponent = math.frexp(most)[1] - _LARGE

    def times(self, columns: Array) -> Array:
        """Return the matrix product matrix @ columns, shape (rows, k)."""
        numbers, scale = self._whole(columns)
        found = np.empty((self.matrix.shape[0], columns.shape[1]))
        for rows, panel in self._panels():
            found[rows] = panel @ numbers
        return found * math.ldexp(scale, self._exponent)

    def transposed_times(self, columns: Array) -> Array:
        """Return the matrix product matrix.T @ columns, shape (columns, k)."""
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


_WORTH = 0.25  # least gain in squared steps for each number of a product; products below are left out
# columns searched at first, later, and how many of them are spare
_FIRST, _LATER, _SPARE = 24, 48, 8
# share of the least square that pays off; if the smallest found square is above it, squares fall so slowly
# that a second pass is needed
_FLAT = 0.2
_INDEPENDENT = 1e-9  # share of the largest square; smaller squares are rounding errors
_DRAWS = Key.of("outer products")

# for matrices with gaps
_ITERATIONS = 3
_LEAST_WEIGHT = 0.05  # least weight of a row with gaps, as a share of its weight without gaps


def products_of(matrix: Matrix, there: Matrix | None, most: int) -> list[Product]:
    """Return the outer products that are worth their bytes, for a matrix in steps.

    Args:
        matrix: changes in steps, 0 where there is no entry.
        there: 1 for each entry, 0 for each gap, same shape; None if there are no gaps. The values of products
            in gaps are ignored.
        most: largest number of products.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    left_over = np.array(matrix.T, order="C") if tall else matrix
    if there is None:
        found = _in_blocks(left_over, most)
    else:
        found = _one_by_one(left_over.copy(), np.array(there.T, order="C") if tall else there, most)
    return [replace(one, left=one.right, right=one.left) for one in found] if tall else found


def _in_blocks(matrix: Matrix, most: int) -> list[Product]:
    found, enough = list[Product](), False
    while not enough:
        count = min(_LATER if found else _FIRST, *matrix.shape)
        block, enough = _block(matrix, count, most - len(found))
        found += block
        if not enough:
            matrix = _without(matrix, block)
    return found


def _block(matrix: Matrix, count: int, most: int) -> tuple[list[Product], bool]:
    """Return the largest products, found with `count` columns, and True if the search is complete."""
    whole = WholeMatrix(matrix)
    signs = _DRAWS.generator().choice(np.array([-1.0, 1.0]), (matrix.shape[0], count))
    directions, squares = _directions(whole, signs)
    least, at_most = _WORTH * sum(matrix.shape), count if count == min(matrix.shape) else count - _SPARE
    if squares.size == count and squares[-1] > _FLAT * least:
        directions, squares = _directions(whole, directions)
    paying = int(np.count_nonzero(squares >= least))
    taken = min(paying, most, at_most)
    block = _rounded(whole, directions[:, :taken], squares[:taken])
    return block, taken in (paying, most) or not block


def _directions(matrix: WholeMatrix, start: Array) -> tuple[Array, Array]:
    """Refine some left vectors by one and a half power iterations; `start` has the shape (rows, k).

    Returns:
        At most k orthonormal left vectors, and the squared norm that each removes, largest first.
    """
    right = _orthonormal(matrix.transposed_times(start))
    left = _orthonormal(matrix.times(right))
    beside = matrix.transposed_times(left)
    squares, turn = np.linalg.eigh(gram(beside))
    return product(left, turn[:, ::-1]), squares[::-1]


def _orthonormal(columns: Array) -> Array:
    """Return an orthonormal basis of the independent columns, shape (n, at most k)."""
    lengths = np.sqrt(np.square(columns).sum(axis=0))
    columns = columns[:, lengths > 0] / lengths[lengths > 0]
    squares, turn = np.linalg.eigh(gram(columns))
    good = squares > _INDEPENDENT * squares.max(initial=0)
    return product(columns, turn[:, good] / np.sqrt(squares[good]))


def _rounded(matrix: WholeMatrix, directions: Array, squares: Array) -> list[Product]:
    """Return products whose left factors approximate these directions in whole numbers."""
    octaves = np.clip(np.rint(np.log2(np.sqrt(squares))), 0, MAX_OCTAVES).astype(np.int64)
    short = np.clip(np.rint(np.ldexp(directions, octaves)), -LARGEST, LARGEST)
    there = short.any(axis=0)
    octaves, short = octaves[there], short[:, there]
    if not octaves.size:
        return []
    scaled = np.ldexp(short, -octaves)
    own, turn = np.linalg.eigh(gram(scaled))
    inverse = product(turn / np.maximum(own, 0.1), np.ascontiguousarray(turn.T))
    best = product(matrix.transposed_times(scaled), inverse)
    long = rounded_down(best.astype(np.float32))
    return [
        Product(int(octave), np.ascontiguousarray(left), np.ascontiguousarray(right))
        for octave, left, right in zip(octaves, short.T.astype(np.int16), long.T, strict=True)
        if right.any()
    ]


def _without(matrix: Matrix, products: list[Product]) -> Matrix:
    left_over = np.empty_like(matrix)
    for part, steps in sum_of(products, *matrix.shape):
        left_over.reshape(-1)[part] = matrix.reshape(-1)[part] - steps.astype(np.float32)
    return left_over


def _one_by_one(left_over: Matrix, there: Matrix, most: int) -> list[Product]:
    """Find products of a matrix with gaps one by one, and subtract them from `left_over` in place."""
    found = list[Product]()
    while len(found) < most and (one := _largest(left_over, there)) is not None:
        change = _scaled(one.left, one.octaves)[:, None] * one.right.astype(np.float32)
        left_over -= np.multiply(change, there, out=change)
        found.append(one)
    return found


def _largest(matrix: Matrix, there: Matrix) -> Product | None:
    """Return the outer product that reduces the matrix's norm most; None if no product pays off.

    The matrix has no more rows than columns.
    """
    right, gain = matrix[np.einsum("rc,rc->r", matrix, matrix).argmax()], 0.0
    for _ in range(_ITERATIONS):
        left = _unit(_beside(right, matrix, there)[0])
        right, gain = _beside(left, matrix.T, there.T)
    if gain < _WORTH * sum(matrix.shape):
        return None
    octaves = min(max(0, round(math.log2(math.sqrt(float(np.square(right).sum()))))), MAX_OCTAVES)
    short = np.clip(np.rint(np.ldexp(left, octaves)), -LARGEST, LARGEST).astype(np.int16)
    best, _ = _beside(short.astype(np.float32), matrix.T, there.T)
    long = rounded_down(np.ldexp(best, octaves))
    return Product(octaves, short, long) if short.any() and long.any() else None


def _beside(right: FlatArray, matrix: Matrix, there: Matrix) -> tuple[FlatArray, float]:
    """Return the best left factor for `right` by least squares, and the squared norm that the product
    removes.

    A least weight limits the factor in rows with few entries where `right` is large.
    """
    square = np.square(right).sum()
    sums = np.einsum("rc,c->r", matrix, right)
    if not square > 0:
        return sums, 0.0
    weights = np.einsum("rc,c->r", there, np.square(right))
    left: FlatArray = sums / np.maximum(weights, _LEAST_WEIGHT * square)
    return left, float((sums * left).sum())


def _scaled(factor: Ints, octaves: int) -> FlatArray:
    scaled: FlatArray = np.ldexp(factor.astype(np.float32), -octaves)
    return scaled


def _unit(vector: FlatArray) -> FlatArray:
    norm = np.sqrt(np.square(vector).sum())
    return vector / norm if norm > 0 else vector
