"""A matrix of changes as a sum of few outer products of integers.

Training changes a layer by a sum of outer products: the change of each neuron, times its inputs. A few of
them have most of the energy. In the first layer of an MLP on UCI HAR (one device, rounds 2 to 40), four of 64
have 0.85 to 0.92 of it. Two, with half as many numbers, have 0.68 to 0.82.

This module defines products and their sum; `product_search.py` finds them. Bytes: docs/wire.md, `lowrank`,
*Products*.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
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
    """Sum of the products in steps, in parts: a range of entries, counted row by row, and their values.

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
