"""Search for the outer products that reduce a matrix most, rounded as they will be sent.

Many products are found at a time. A few passes over the matrix find the directions with the most energy. This
is a randomised range finder (Halko, Martinsson and Tropp 2011, arXiv:0909.4061) with one and a half power
iterations, three if much remains, and 8 spare columns. The directions are rotated to those of the matrix
(Rayleigh and Ritz), largest first. The shorter factors are rounded first. The longer factors are then the
best fit, jointly, to the rounded ones. If more products pay off, the search repeats with the remainder.

If only some entries of a matrix are sent, products are fitted to these, one after the other (alternating
least squares). This works as well: for two of three entries of a layer of LeNet-5 (SRP-pFed), products take a
third of the bytes of single entries.

Sums are numpy's own or exact (`whole_matrices.py`), so they do not depend on the number of threads of a
linear algebra library. The eigenvectors do come from such a library, but their matrices are so small that it
uses one thread.
"""

import math
from dataclasses import replace

import numpy as np

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.entropy.quarter_octaves import Ints
from fleetune.protocols.update.entropy.small_integers import LARGEST
from fleetune.protocols.update.products.outer_products import (
    MAX_OCTAVES,
    Matrix,
    Product,
    rounded_down,
    sum_of,
)
from fleetune.protocols.update.products.whole_matrices import Array, WholeMatrix, gram, product

_WORTH = 0.25  # least gain in squared steps for each number of a product; products below are left out
_FIRST, _LATER, _SPARE = (
    24,
    48,
    8,
)  # columns searched at first, later, and how many of them are spare
# share of the least square that pays off; if the smallest found square is above it, squares fall so slowly
# that a second pass is needed
_FLAT = 0.2
_INDEPENDENT = 1e-9  # share of the largest square; smaller squares are rounding errors
_DRAWS = Key.of("outer products")

# for matrices with gaps
_ITERATIONS = 3
_LEAST_WEIGHT = 0.05  # least weight of a row with gaps, as a share of its weight without gaps


def products_of(matrix: Matrix, there: Matrix | None, most: int) -> list[Product]:
    """Outer products that are worth their bytes, for a matrix in steps.

    Args:
        matrix: changes in steps, 0 where there is no entry.
        there: 1 for each entry, 0 for each gap, same shape; None if there are no gaps. The values of products
            in gaps do not matter.
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
    """The largest products, found with `count` columns, and True if the search is complete."""
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
        At most k orthonormal left vectors, and the square that each removes, largest first.
    """
    right = _orthonormal(matrix.transposed_times(start))
    left = _orthonormal(matrix.times(right))
    beside = matrix.transposed_times(left)
    squares, turn = np.linalg.eigh(gram(beside))
    return product(left, turn[:, ::-1]), squares[::-1]


def _orthonormal(columns: Array) -> Array:
    """Orthonormal basis of the independent columns, shape (n, at most k)."""
    lengths = np.sqrt(np.square(columns).sum(axis=0))
    columns = columns[:, lengths > 0] / lengths[lengths > 0]
    squares, turn = np.linalg.eigh(gram(columns))
    good = squares > _INDEPENDENT * squares.max(initial=0)
    return product(columns, turn[:, good] / np.sqrt(squares[good]))


def _rounded(matrix: WholeMatrix, directions: Array, squares: Array) -> list[Product]:
    """Products whose left factors approximate these directions in whole numbers."""
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
    """Products of a matrix with gaps, found one after the other. Subtracts them from `left_over`, in
    place.
    """
    found = list[Product]()
    while len(found) < most and (one := _largest(left_over, there)) is not None:
        change = _scaled(one.left, one.octaves)[:, None] * one.right.astype(np.float32)
        left_over -= np.multiply(change, there, out=change)
        found.append(one)
    return found


def _largest(matrix: Matrix, there: Matrix) -> Product | None:
    """The outer product that removes most from a matrix with no more rows than columns; None if none pays
    off.
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
    """The best left factor for `right` by least squares, and the square that both remove from `matrix`.

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
