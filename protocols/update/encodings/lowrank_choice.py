"""How `lowrank` tells the changes of a tensor: in products, entries, or products and what these leave."""

import numpy as np

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.encodings.chunks import chunks
from fleetune.protocols.update.encodings.lowrank_grids import Tensor, changes_of
from fleetune.protocols.update.encodings.outer_products import (
    Matrix,
    Product,
    products_of,
    rounded_down,
)
from fleetune.protocols.update.entropy.quarter_octaves import Ints

_BIT = 0.1  # squared steps that a bit is worth; 0.05 and 0.2 take 2 to 3 % more bytes for the same error
_TELLING = 1.0  # squared steps for each number of a product that is worth telling beside entries


def cheapest(tensor: Tensor, steps: FlatArray) -> tuple[list[Product], Ints | None]:
    """Products and entries that lose least for what they take.

    Args:
        tensor: what these are of.
        steps: its changes, finite, shape (size,).

    Returns:
        Products; whole steps of all entries beside them, None: none is sent.
    """
    entries = rounded_down(steps)
    if not entries.any() and not tensor.most_products:
        return [], None
    best: tuple[list[Product], Ints | None] = ([], entries if entries.any() else None)
    cost = _cost([], entries, steps)
    if not tensor.most_products:
        return best
    products = products_of(*_matrix(tensor, steps), tensor.most_products)
    for number in sorted({len(products), _number_telling(tensor, products)} - {0}):
        left_over, some = steps.copy(), products[:number]
        for part, told in changes_of(tensor, some):
            left_over[part] -= told.astype(np.float32)
        rest = rounded_down(left_over)
        for beside in [None, rest] if rest.any() else [None]:
            this = _cost(some, beside, left_over)
            if this < cost:
                best, cost = (some, beside), this
    return best


def _number_telling(tensor: Tensor, products: list[Product]) -> int:
    """How many products there are before the first that tells little."""
    share = tensor.size / (tensor.rows * tensor.columns)
    least = _TELLING * (tensor.rows + tensor.columns)
    return next((at for at, one in enumerate(products) if share * one.square < least), len(products))


def _matrix(tensor: Tensor, steps: FlatArray) -> tuple[Matrix, Matrix | None]:
    """The matrix of these entries, 0 where it has none, and 1 where it has some; None: everywhere."""
    shape = (tensor.rows, tensor.columns)
    if tensor.scattered is None:
        return steps.reshape(shape), None
    matrix = np.zeros(tensor.rows * tensor.columns, np.float32)
    there = np.zeros_like(matrix)
    for chunk in chunks(tensor.size):
        cells = tensor.cells_of(chunk)
        matrix[cells], there[cells] = steps[chunk], 1
    return matrix.reshape(shape), there.reshape(shape)


def _cost(products: list[Product], entries: Ints | None, steps: FlatArray) -> float:
    """Squared steps that are lost, and those that the bytes are worth."""
    bits = sum(_bits(factor) for one in products for factor in (one.left, one.right))
    lost = 0.0
    for chunk in chunks(steps.size):
        left_over = steps[chunk] if entries is None else steps[chunk] - entries[chunk]
        lost += float(np.square(left_over, dtype=np.float64).sum())
    return lost + _BIT * (bits if entries is None else bits + _bits(entries))


def _bits(integers: Ints) -> float:
    """About what they take: their entropy, and 4 bits to tell how often each of them is there."""
    counts = np.unique(integers, return_counts=True)[1]
    entropy = float(-(counts * np.log2(counts / integers.size)).sum())
    return entropy + 4 * counts.size
