"""A matrix of changes as a sum of few outer products of integers.

What training changes in a layer is a sum of outer products (what a neuron is to change, by what feeds it), of
which a few have most of the energy: four of 64 have 0.85 to 0.92 of it in the first layer of an MLP on UCI
HAR (one device, rounds 2 to 40), where two, at half as many numbers, have 0.68 to 0.82.

Products are taken one after the other from what is left, each by power iteration. The shorter factor is
rounded first, and the longer one is the best for it as it was rounded. Sums are numpy's own, not a linear
algebra library's, so that they do not depend on how many threads that has.
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


def products_of(matrix: Matrix, most: int) -> list[Product]:
    """The outer products of a matrix in steps that are worth their bytes, at most so many."""
    tall = matrix.shape[0] > matrix.shape[1]
    left_over, found = np.array(matrix.T if tall else matrix, order="C"), list[Product]()
    while len(found) < most and (product := _largest(left_over)) is not None:
        left_over -= _scaled(product.left, product.octaves)[:, None] * product.right.astype(np.float32)
        found.append(replace(product, left=product.right, right=product.left) if tall else product)
    return found


def _largest(matrix: Matrix) -> Product | None:
    """The outer product that takes most off a matrix that is not tall; None: none is worth its bytes."""
    right = matrix[np.einsum("rc,rc->r", matrix, matrix).argmax()]
    for _ in range(_ITERATIONS):
        left = _unit(np.einsum("rc,c->r", matrix, right))
        right = np.einsum("rc,r->c", matrix, left)
    norm = math.sqrt(float(np.square(right).sum()))
    if norm * norm < _WORTH * sum(matrix.shape):
        return None
    octaves = min(round(math.log2(norm)), MAX_OCTAVES)
    short = np.clip(np.rint(np.ldexp(left, octaves)), -LARGEST, LARGEST).astype(np.int16)
    square = int(np.square(short, dtype=np.int64).sum())
    sums = np.einsum("rc,r->c", matrix, short.astype(np.float32))
    long = rounded_down(np.ldexp(sums / np.float32(square or 1), octaves))
    return Product(octaves, short, long) if short.any() and long.any() else None


def _scaled(factor: Ints, octaves: int) -> FlatArray:
    scaled: FlatArray = np.ldexp(factor.astype(np.float32), -octaves)
    return scaled


def _unit(vector: FlatArray) -> FlatArray:
    norm = np.sqrt(np.square(vector).sum())
    return vector / norm if norm > 0 else vector


def rounded_down(vector: FlatArray) -> Ints:
    """To whole numbers, those towards 0 where they are less than 0.6 away."""
    sizes = np.floor(np.abs(vector) + np.float32(_UPWARD))
    return np.copysign(np.minimum(sizes, LARGEST), vector).astype(np.int16)


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
