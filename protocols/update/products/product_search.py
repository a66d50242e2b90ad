"""Which outer products take most off a matrix, rounded as they will be sent.

Products are found many at a time. A few passes over the matrix find the directions in which it has most (a
randomised range finder: Halko, Martinsson and Tropp 2011, arXiv:0909.4061, with one and a half power
iterations, three where much is left, and 8 columns to spare); these are rotated to the matrix's own (Rayleigh
and Ritz), largest first. The shorter factors are rounded first, and the longer ones are the best, all
together, for them as they were rounded. Where more products pay, the same is done with what is left.

Of a matrix of which some entries alone are sent, products are fitted to these (alternating least squares),
one after the other, and tell them as well: two of three entries of a layer of LeNet-5 (SRP-pFed) take a third
of the bytes that they take one by one. Sums are numpy's own or exact (`whole_matrices.py`), so that they do
not depend on how many threads a linear algebra library has; the eigenvectors that one is asked for are of
matrices so small that it takes one.
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

_WORTH = 0.25  # squared steps for each number of a product; one that has less is left out
_FIRST, _LATER, _SPARE = (
    24,
    48,
    8,
)  # columns that are looked at at a time, and those of them that are not taken
_FLAT = 0.2  # of what pays: where the smallest is more, squares fall so slowly that others may be larger
_INDEPENDENT = 1e-9  # of the largest square: what is below is rounding
_DRAWS = Key.of("outer products")

# of matrices with gaps
_ITERATIONS = 3
_LEAST_WEIGHT = 0.05  # of all that entries could have that a row lacks


def products_of(matrix: Matrix, there: Matrix | None, most: int) -> list[Product]:
    """The outer products of a matrix in steps that are worth their bytes, at most so many.

    Args:
        matrix: 0 where there is no entry.
        there: 1 where there is an entry, else 0, same shape; None: everywhere. What products are where there
            is none does not matter.
        most: so many at most.
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
    """The largest products, from so many columns; are these all that pay, or that may be?"""
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
    """What a step and a half of power iteration make of some left vectors, shape (rows, k).

    Returns:
        Orthonormal left vectors, at most as many; the squares that each takes off, largest first.
    """
    right = _orthonormal(matrix.transposed_times(start))
    left = _orthonormal(matrix.times(right))
    beside = matrix.transposed_times(left)
    squares, turn = np.linalg.eigh(gram(beside))
    return product(left, turn[:, ::-1]), squares[::-1]


def _orthonormal(columns: Array) -> Array:
    """As many as are independent, shape (n, k)."""
    lengths = np.sqrt(np.square(columns).sum(axis=0))
    columns = columns[:, lengths > 0] / lengths[lengths > 0]
    squares, turn = np.linalg.eigh(gram(columns))
    good = squares > _INDEPENDENT * squares.max(initial=0)
    return product(columns, turn[:, good] / np.sqrt(squares[good]))


def _rounded(matrix: WholeMatrix, directions: Array, squares: Array) -> list[Product]:
    """Products whose left factors are these directions, as good as whole numbers can be."""
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
    """Of a matrix with gaps, which is changed."""
    found = list[Product]()
    while len(found) < most and (one := _largest(left_over, there)) is not None:
        change = _scaled(one.left, one.octaves)[:, None] * one.right.astype(np.float32)
        left_over -= np.multiply(change, there, out=change)
        found.append(one)
    return found


def _largest(matrix: Matrix, there: Matrix) -> Product | None:
    """The outer product that takes most off a matrix that is not tall; None: none is worth its bytes."""
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
    """The factor that is best beside `right`, by least squares, and the squares that both take off `matrix`.

    A row with next to no entries where `right` has something is not led far by them.
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
