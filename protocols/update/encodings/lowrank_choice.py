"""How `lowrank` tells the changes of a tensor: in products, entries, or products and what these leave."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.encodings.chunks import CHUNK, chunks
from fleetune.protocols.update.encodings.lowrank_grids import Tensor, changes_of
from fleetune.protocols.update.entropy.quarter_octaves import Ints
from fleetune.protocols.update.products.outer_products import (
    Matrix,
    Product,
    rounded_down,
)
from fleetune.protocols.update.products.product_search import products_of

_BIT = 0.1  # squared steps that a bit is worth; 0.05 and 0.2 take 2 to 3 % more bytes for the same error
_NEARLY = np.float32(0.59)  # of a step: what is less is 0 in any case
_TELLING = 1.0  # squared steps for each number of a product that is worth telling beside entries


@dataclass(frozen=True)
class _Told:
    """One way to tell a tensor; `cost`: squared steps that are lost, and those that its bytes are worth."""

    products: list[Product]
    entries: Ints | None
    cost: float


def cheapest(tensor: Tensor, steps: FlatArray) -> tuple[list[Product], Ints | None]:
    """Products and entries that lose least for what they take.

    Args:
        tensor: what these are of.
        steps: its changes, finite, shape (size,).

    Returns:
        Products; whole steps of all entries beside them, None: none is sent.
    """
    best = _ways(tensor, steps, [], 0.0)[-1]
    if not tensor.most_products or not steps.any():
        return [], best.entries
    products = products_of(*_matrix(tensor, steps), tensor.most_products)
    bits = _bits_of(products)
    for number in sorted({len(products), _number_telling(tensor, products)} - {0}):
        ways = _ways(tensor, steps, products[:number], float(bits[:number].sum()))
        best = min(best, *ways, key=lambda way: way.cost)
    return best.products, best.entries


def _ways(tensor: Tensor, steps: FlatArray, products: list[Product], bits: float) -> list[_Told]:
    """Products, which take so many bits, alone; and if they leave some, with entries beside them."""
    lost = lost_beside = 0.0
    rest, found = None, list[Ints]()
    for part, left_over in _left_over(tensor, steps, products):
        square = _square(left_over)
        lost, lost_beside = lost + square, lost_beside + square
        large = np.flatnonzero(np.abs(left_over) >= _NEARLY)
        entries = rounded_down(some := left_over[large])
        if entries.any():
            lost_beside += _square(some - entries) - _square(some)
            rest = np.zeros(tensor.size, np.int16) if rest is None else rest
            rest[part][large] = entries
            found.append(entries)
    ways = [_Told(products, None, lost + _BIT * bits)]
    if rest is not None:
        ways.append(_Told(products, rest, lost_beside + _BIT * (bits + _bits(found, tensor.size))))
    return ways


def _left_over(
    tensor: Tensor, steps: FlatArray, products: list[Product]
) -> Iterator[tuple[slice, FlatArray]]:
    if not products:
        yield from ((chunk, steps[chunk]) for chunk in chunks(tensor.size))
        return
    for part, told in changes_of(tensor, products):
        yield part, steps[part] - told.astype(np.float32)


def _square(steps: FlatArray) -> float:
    """In float32: chunks are short, and sums of few of them are summed up."""
    return float(np.einsum("i,i->", steps, steps))


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


def _bits(found: list[Ints], size: int) -> float:
    """About what so many integers take, these and zeros: their entropy, and 4 bits for each number."""
    least = min(0, *(int(some.min()) for some in found))
    most = max(0, *(int(some.max()) for some in found))
    counts = np.zeros((1, most - least + 1), np.int64)
    for some in found:
        counts[0] += np.bincount(some.astype(np.int64) - least, minlength=counts.size)
    counts[0, -least] += size - sum(some.size for some in found)
    return float(_bits_by_counts(counts)[0])


def _bits_of(products: list[Product]) -> NDArray[np.float64]:
    """Of each, shape (products,)."""
    if not products:
        return np.zeros(0)
    left, right = (np.stack([getattr(one, side) for one in products]) for side in ("left", "right"))
    return _bits_of_each(left) + _bits_of_each(right)


def _bits_of_each(factors: Ints) -> NDArray[np.float64]:
    """Of each factor, shape (factors, n), likewise; shape (factors,)."""
    least = int(factors.min())
    span = int(factors.max()) - least + 1
    at_once, found = max(1, CHUNK // span), list[NDArray[np.float64]]()
    for start in range(0, len(factors), at_once):
        some = factors[start : start + at_once].astype(np.int64) - least
        cells = some + span * np.arange(len(some))[:, None]
        counts = np.bincount(cells.reshape(-1), minlength=span * len(some))
        found.append(_bits_by_counts(counts.reshape(-1, span)))
    return np.concatenate(found)


def _bits_by_counts(counts: Ints) -> NDArray[np.float64]:
    """Of each row, how often each number is there, shape (rows, numbers)."""
    size = counts.sum(axis=1)
    there = np.maximum(counts, 1)
    entropy = size * np.log2(size) - (counts * np.log2(there)).sum(axis=1)
    bits: NDArray[np.float64] = entropy + 4 * np.count_nonzero(counts, axis=1)
    return bits
