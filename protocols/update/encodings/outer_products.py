"""A matrix of changes as a sum of few outer products of integers.

What training changes in a layer is a sum of outer products (what a neuron is to change, by what feeds it), of
which a few have most of the energy: four of 64 have 0.85 to 0.92 of it in the first layer of an MLP on UCI
HAR (one device, rounds 2 to 40), where two, at half as many numbers, have 0.68 to 0.82.

Products are taken one after the other from what is left, each by power iteration. The shorter factor is
rounded first, and the longer one is the best for it as it was rounded. Of a matrix of which some entries
alone are sent, products are fitted to these (alternating least squares) and tell them as well: two of three
entries of a layer of LeNet-5 (SRP-pFed) take a third of the bytes that they take one by one. Sums are numpy's
own, not a linear algebra library's, so that they do not depend on how many threads that has.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.entropy.quarter_octaves import Ints
from fleetune.protocols.update.entropy.small_integers import LARGEST

MAX_PRODUCTS = 255
MAX_OCTAVES = 14
_ITERATIONS = 3
_WORTH = 0.25  # squared steps for each number of a product; one that has less is left out
_LEAST_WEIGHT = 0.05  # of all that entries could have that a row lacks
_UPWARD = 0.4  # of a step, less than a half: what is nearly 0 costs more than it brings
_ENTRIES, _PRODUCTS = 1 << 16, 32  # of the sum that are made at a time

Matrix = NDArray[np.float32]
Steps = NDArray[np.float64]


@dataclass(frozen=True)
class Product:
    """One outer product: 2^-octaves times `left` by `right`, in steps.

    Attributes:
        octaves: log2 of its norm in steps, about, 0 to MAX_OCTAVES.
        left, right: integers up to LARGEST, int16, shapes (rows,) and (columns,).
    """

    octaves: int
    left: Ints
    right: Ints

    @property
    def square(self) -> float:
        """Of its norm, in squared steps."""
        left, right = (float(np.square(one, dtype=np.int64).sum()) for one in (self.left, self.right))
        return math.ldexp(left * right, -2 * self.octaves)


def products_of(matrix: Matrix, there: Matrix | None, most: int) -> list[Product]:
    """The outer products of a matrix in steps that are worth their bytes, at most so many.

    Args:
        matrix: 0 where there is no entry.
        there: 1 where there is an entry, else 0, same shape; None: everywhere. What products are where there
            is none does not matter.
        most: so many at most.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    left_over, found = np.array(matrix.T if tall else matrix, order="C"), list[Product]()
    if there is not None and tall:
        there = np.array(there.T, order="C")
    while len(found) < most and (product := _largest(left_over, there)) is not None:
        change = _scaled(product.left, product.octaves)[:, None] * product.right.astype(np.float32)
        left_over -= change if there is None else np.multiply(change, there, out=change)
        found.append(replace(product, left=product.right, right=product.left) if tall else product)
    return found


def _largest(matrix: Matrix, there: Matrix | None) -> Product | None:
    """The outer product that takes most off a matrix that is not tall; None: none is worth its bytes."""
    right, gain = matrix[np.einsum("rc,rc->r", matrix, matrix).argmax()], 0.0
    for _ in range(_ITERATIONS):
        left = _unit(_beside(right, matrix, there)[0])
        right, gain = _beside(left, matrix.T, None if there is None else there.T)
    if gain < _WORTH * sum(matrix.shape):
        return None
    octaves = min(max(0, round(math.log2(math.sqrt(float(np.square(right).sum()))))), MAX_OCTAVES)
    short = np.clip(np.rint(np.ldexp(left, octaves)), -LARGEST, LARGEST).astype(np.int16)
    best, _ = _beside(short.astype(np.float32), matrix.T, None if there is None else there.T)
    long = rounded_down(np.ldexp(best, octaves))
    return Product(octaves, short, long) if short.any() and long.any() else None


def _beside(right: FlatArray, matrix: Matrix, there: Matrix | None) -> tuple[FlatArray, float]:
    """The factor that is best beside `right`, by least squares, and the squares that both take off `matrix`.

    A row with next to no entries where `right` has something is not led far by them.
    """
    square = np.square(right).sum()
    sums = np.einsum("rc,c->r", matrix, right)
    if not square > 0:
        return sums, 0.0
    weights = square if there is None else np.einsum("rc,c->r", there, np.square(right))
    left: FlatArray = sums / np.maximum(weights, _LEAST_WEIGHT * square)
    return left, float((sums * left).sum())


def _scaled(factor: Ints, octaves: int) -> FlatArray:
    scaled: FlatArray = np.ldexp(factor.astype(np.float32), -octaves)
    return scaled


def _unit(vector: FlatArray) -> FlatArray:
    norm = np.sqrt(np.square(vector).sum())
    return vector / norm if norm > 0 else vector


def rounded_down(vector: FlatArray) -> Ints:
    """To whole numbers, those towards 0 where they are less than 0.6 away."""
    sizes = np.abs(vector)
    sizes += np.float32(_UPWARD)
    np.minimum(np.floor(sizes, out=sizes), np.float32(LARGEST), out=sizes)
    return np.copysign(sizes, vector, out=sizes).astype(np.int16)


def any_left(vector: FlatArray) -> bool:
    """Does `rounded_down` leave anything of it?"""
    most = max(vector.max(initial=0), -vector.min(initial=0))
    return bool(most + np.float32(_UPWARD) >= 1)


def sum_of(products: list[Product], rows: int, columns: int) -> Iterator[tuple[slice, Steps]]:
    """The sum in steps, in parts: which of its entries, row by row, and these.

    All are multiples of 2^-MAX_OCTAVES and take less than 53 bits, so that any order of adding, and any
    library's, gives the same.
    """
    left, right = np.stack([one.left for one in products], 1), np.stack([one.right for one in products])
    octaves = np.array([one.octaves for one in products])
    at_a_time = max(1, _ENTRIES // columns)
    for start in range(0, rows, at_a_time):
        here = left[start : start + at_a_time]
        part = np.zeros((len(here), columns))
        for first in range(0, len(products), _PRODUCTS):
            some = slice(first, first + _PRODUCTS)
            part += np.ldexp(here[:, some].astype(np.float64), -octaves[some]) @ right[some].astype(
                np.float64
            )
        yield slice(start * columns, start * columns + part.size), part.reshape(-1)
