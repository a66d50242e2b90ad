"""Chooses how `lowrank` writes a tensor: as products, as entries, or as products and entries."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.encodings.chunks import CHUNK, chunks
from fleetune.protocols.update.encodings.lowrank_grids import Tensor, changes_of
from fleetune.protocols.update.entropy.octaves import Ints
from fleetune.protocols.update.products import (
    Matrix,
    Product,
    products_of,
    rounded_down,
)

# squared steps of error that one bit may save; with 0.05 or 0.2, the same error takes 2 to 3 % more bytes
_BIT = 0.1
_NEARLY = np.float32(0.59)  # steps; smaller changes become 0 in any case
_TELLING = 1.0  # least gain of a product sent together with entries, in squared steps for each of its numbers


@dataclass(frozen=True)
class _Candidate:
    """A candidate for writing a tensor; `cost` is its squared error in steps, plus `_BIT` for each bit."""

    products: list[Product]
    entries: Ints | None
    cost: float


def cheapest(tensor: Tensor, steps: FlatArray) -> tuple[list[Product], Ints | None]:
    """Return the products and entries with the least cost: squared error plus the value of their bits.

    Args:
        tensor: the tensor's place in the patch and its matrix.
        steps: changes of the tensor in steps, finite, shape (size,).

    Returns:
        The products, and the whole steps of all entries that follow them; None if no entries are sent.
    """
    best = _candidates(tensor, steps, [], 0.0)[-1]
    if not tensor.most_products or not steps.any():
        return [], best.entries
    products = products_of(*_matrix(tensor, steps), tensor.most_products)
    bits = _bits_of(products)
    for number in sorted({len(products), _number_telling(tensor, products)} - {0}):
        candidates = _candidates(tensor, steps, products[:number], float(bits[:number].sum()))
        best = min(best, *candidates, key=lambda candidate: candidate.cost)
    return best.products, best.entries


def _candidates(tensor: Tensor, steps: FlatArray, products: list[Product], bits: float) -> list[_Candidate]:
    """Return the candidates with these products, which take `bits`: without entries, and with entries.

    The candidate with entries is left out if all entries are 0.
    """
    lost = lost_beside = 0.0
    rest, found = None, list[Ints]()
    for part, remainder in _remainders(tensor, steps, products):
        square = _square(remainder)
        lost, lost_beside = lost + square, lost_beside + square
        large = np.flatnonzero(np.abs(remainder) >= _NEARLY)
        entries = rounded_down(some := remainder[large])
        if entries.any():
            lost_beside += _square(some - entries) - _square(some)
            rest = np.zeros(tensor.size, np.int16) if rest is None else rest
            rest[part][large] = entries
            found.append(entries)
    candidates = [_Candidate(products, None, lost + _BIT * bits)]
    if rest is not None:
        candidates.append(_Candidate(products, rest, lost_beside + _BIT * (bits + _bits(found, tensor.size))))
    return candidates


def _remainders(
    tensor: Tensor, steps: FlatArray, products: list[Product]
) -> Iterator[tuple[slice, FlatArray]]:
    if not products:
        yield from ((chunk, steps[chunk]) for chunk in chunks(tensor.size))
        return
    for part, change in changes_of(tensor, products):
        yield part, steps[part] - change.astype(np.float32)


def _square(steps: FlatArray) -> float:
    """Return the sum of squares. float32 suffices, because chunks are short and few sums are added."""
    return float(np.einsum("i,i->", steps, steps))


def _number_telling(tensor: Tensor, products: list[Product]) -> int:
    """Return the number of products before the first one that gains too little compared with entries."""
    share = tensor.size / (tensor.rows * tensor.columns)
    least = _TELLING * (tensor.rows + tensor.columns)
    return next((at for at, one in enumerate(products) if share * one.square < least), len(products))


def _matrix(tensor: Tensor, steps: FlatArray) -> tuple[Matrix, Matrix | None]:
    """Return the matrix of the tensor's entries, 0 in gaps, and a matrix with 1 for each entry; None without
    gaps.
    """
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
    """Return the estimated bits of `size` integers: entropy, plus 4 bits for each distinct number.

    The integers are those in `found`; the others are 0.
    """
    least = min(0, *(int(some.min()) for some in found))
    most = max(0, *(int(some.max()) for some in found))
    counts = np.zeros((1, most - least + 1), np.int64)
    for some in found:
        counts[0] += np.bincount(some.astype(np.int64) - least, minlength=counts.size)
    counts[0, -least] += size - sum(some.size for some in found)
    return float(_bits_by_counts(counts)[0])


def _bits_of(products: list[Product]) -> NDArray[np.float64]:
    """Return the estimated bits of each product, shape (products,)."""
    if not products:
        return np.zeros(0)
    left, right = (np.stack([getattr(one, side) for one in products]) for side in ("left", "right"))
    return _bits_of_each(left) + _bits_of_each(right)


def _bits_of_each(factors: Ints) -> NDArray[np.float64]:
    """Return the estimated bits of each factor; `factors` has shape (factors, n), the result (factors,)."""
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
    """Return the estimated bits of each row, from the count of each number in it, shape (rows, numbers)."""
    size = counts.sum(axis=1)
    there = np.maximum(counts, 1)
    entropy = size * np.log2(size) - (counts * np.log2(there)).sum(axis=1)
    bits: NDArray[np.float64] = entropy + 4 * np.count_nonzero(counts, axis=1)
    return bits
