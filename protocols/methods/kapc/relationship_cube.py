"""KAPC's relationship cube (Zhi et al., section 4): each device's share in every other device's layers.

With N devices and L layers, `cube` has shape (N, L, N). cube[i, l, j] is the share of device j in the target
of device i's layer l. A row cube[i, l] is not negative and sums to 1. `copies[l][j]` is device j's layer l as
a vector. `grams[l]` holds the inner products of these vectors, shape (N, N).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Cube = NDArray[np.float64]
Vector = NDArray[Any]  # the product is in float32
Copies = Sequence[Sequence[Vector]]

# entries of a layer processed at a time, so that memory does not grow with devices and layer size
_CHUNK = 8192


def gram(copies: Sequence[Vector], *, centred: bool = False) -> NDArray[np.float64]:
    """Return inner products <w_i, w_j> of one layer of N devices, float64, shape (N, N).

    With `centred`, the mean over the devices is first subtracted; the result is exactly 0 if all are equal.
    """
    products = np.zeros((len(copies), len(copies)))
    for start in range(0, copies[0].size, _CHUNK):
        part = np.stack([copy[start : start + _CHUNK] for copy in copies]).astype(np.float64)
        if centred:
            part -= part.mean(axis=0)
        products += part @ part.T
    return products


def coaching_gradient(
    cube: Cube, grams: Sequence[NDArray[np.float64]], coaching: float, equal_sharing: float
) -> Cube:
    """Return the gradient of coaching * ||s_i - w_i||^2 + equal_sharing / 2 * ||r_i - 1/N||^2, shape of
    `cube`.

    Here s_i = sum_j r_ij w_j. Eq. (11)-(13), layer by layer: 2 * coaching * <w_j, s_i - w_i> + equal_sharing
    * (r_ij - 1/N). `coaching` and `equal_sharing` are lambda and beta of the paper.
    """
    products = np.stack([cube[:, layer] @ gram - gram for layer, gram in enumerate(grams)], axis=1)
    gradient: Cube = 2 * coaching * products + equal_sharing * (cube - 1 / cube.shape[-1])
    return gradient


def descend(
    cube: Cube,
    grams: Sequence[NDArray[np.float64]],
    *,
    coaching: float,
    equal_sharing: float,
    rate: float,
    per_layer: bool = False,
    safe: bool = False,
) -> Cube:
    """Take one gradient step on the cube (eq. 12). Its rows need to be normalised afterwards.

    Args:
        cube: rows that sum to 1.
        grams: inner products of each layer. Centred ones give the gradient along the rows that sum to 1.
        coaching: lambda.
        equal_sharing: beta.
        rate: eta of the paper.
        per_layer: True gives `rate` the unit 1 / `curvature` of each layer. A layer without curvature stays
            unchanged.
        safe: True limits the step of each layer to 1 / its curvature, so that many steps in a row do not
            diverge.
    """
    rates = np.full(len(grams), rate)
    if per_layer or safe:
        curvatures = np.array([curvature(gram, coaching, equal_sharing) for gram in grams])
        inverse = np.divide(1, curvatures, out=np.zeros_like(curvatures), where=curvatures > 0)
        if per_layer:
            rates = rate * inverse
        if safe:
            rates = np.where(curvatures > 0, np.minimum(rates, inverse), rates)
    return cube - rates[:, np.newaxis] * coaching_gradient(cube, grams, coaching, equal_sharing)


def curvature(gram: NDArray[np.float64], coaching: float, equal_sharing: float) -> float:
    """Return the Lipschitz constant of one layer's `coaching_gradient`: L_r of Theorem 1."""
    return float(2 * coaching * np.linalg.eigvalsh(gram)[-1] + equal_sharing)


def normalise(cube: Cube) -> Cube:
    """Clip at 0 and divide each row by its sum.

    Values that are not finite count as 0. A row with sum 0, or with a sum that overflows, becomes uniform.
    """
    clipped = np.maximum(cube, 0)
    with np.errstate(over="ignore"):
        sums = clipped.sum(axis=-1, keepdims=True)
        if not np.isfinite(sums).all():
            clipped = _without_infinities(clipped)
            sums = clipped.sum(axis=-1, keepdims=True)
    uniform = np.full_like(clipped, 1 / cube.shape[-1])
    shares: Cube = np.divide(clipped, sums, out=uniform, where=(sums > 0) & np.isfinite(sums))
    return shares


def project_simplex(cube: Cube) -> Cube:
    """Project each row to the nearest shares: subtract one number from the row, then clip at 0.

    Shares are not negative and sum to 1. Rows are first shifted by their largest share, because 1 would
    vanish next to large numbers. A share that is 1 or more below the largest becomes 0. Values that are not
    finite count as 0.
    """
    with np.errstate(over="ignore"):
        known = _without_infinities(cube)
        relative = np.maximum(known - known.max(axis=-1, keepdims=True), -1)
    descending = -np.sort(-relative, axis=-1)
    excess = (np.cumsum(descending, axis=-1) - 1) / np.arange(1, cube.shape[-1] + 1)
    last = np.count_nonzero(descending > excess, axis=-1, keepdims=True) - 1
    shares: Cube = np.maximum(relative - np.take_along_axis(excess, last, axis=-1), 0)
    return shares


def slice_participants(cube: Cube, places: Sequence[int]) -> Cube:
    """Return the cube among the devices at `places`, normalised (Alg. 5 line 6)."""
    return normalise(cube[_among(cube, places)])


def write_back(cube: Cube, places: Sequence[int], part: Cube) -> Cube:
    """Return a copy with `part` among the devices at `places` and their rows normalised (Alg. 5 lines 11-12).

    The rows of all other devices do not change.
    """
    written = cube.copy()
    written[_among(cube, places)] = part
    written[list(places)] = normalise(written[list(places)])
    return written


def grow(cube: Cube, places: Sequence[int], size: int) -> Cube:
    """Return a cube of `size` devices, in which the devices of `cube` have the given places.

    A new device gets 1/size of every row; the other devices keep their proportions in the rest. A new
    device's own rows are uniform. From an empty cube, this is the paper's start at 1/N.
    """
    grown = np.full((size, cube.shape[1], size), 1 / size)
    grown[_among(grown, places)] = cube * (len(places) / size)
    return grown


def shrink(cube: Cube, place: int) -> Cube:
    """Return the cube without the device at this place; the others keep their proportions in each row."""
    kept = np.delete(np.delete(cube, place, axis=0), place, axis=2)
    sums = kept.sum(axis=2, keepdims=True)
    shrunk = np.full_like(kept, 1 / max(1, len(kept)))
    np.divide(kept, sums, out=shrunk, where=sums > 0)
    return shrunk


def server_model(rows: NDArray[np.float64], copies: Copies) -> list[NDArray[np.float64]]:
    """Return one device's target s^l = sum_j r_j^l w_j^l for each layer (eq. 15 and 34), float64.

    `rows` are the device's rows of the cube, shape (L, N).
    """
    return [_combine(row, layer) for row, layer in zip(rows, copies, strict=True)]


def _combine(shares: NDArray[np.float64], vectors: Sequence[Vector]) -> NDArray[np.float64]:
    total = np.zeros(vectors[0].shape)
    for share, vector in zip(shares, vectors, strict=True):
        if share:
            total += np.multiply(vector, share, dtype=np.float64)
    return total


def _without_infinities(cube: Cube) -> Cube:
    known: Cube = np.where(np.isfinite(cube), cube, 0.0)
    return known


def _among(cube: Cube, places: Sequence[int]) -> tuple[NDArray[np.intp], ...]:
    where = np.asarray(places, dtype=np.intp)
    return np.ix_(where, np.arange(cube.shape[1]), where)
