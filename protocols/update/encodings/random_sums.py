"""Random sums: few bits for many entries, with decoded values that are right on average.

Each entry gets a random sign and is added to one of few sums (a count sketch: Charikar et al. 2002). A
Hadamard transform rotates the sums. The signs of the results are sent, with one scale for all (DRIVE,
Vargaftik et al. 2021, arXiv:2105.08339, with its unbiased scale). An entry is read as its sum times its sign.
This is the entry itself, plus the other entries of its sum as noise. Memory: the sums and one chunk.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.chunks import CHUNK, LARGEST

# squared noise at one entry a sum, from the other entries of the sum and from sending signs only
NOISE = math.pi / 2
_SEED_BITS = 16
_FEWEST_LOG, _MOST_LOG = 4, 26  # least and largest log2 of the number of sums

Vector = NDArray[np.float64] | NDArray[np.float32]


@dataclass(frozen=True)
class RandomSums:
    """Signs of rotated random sums, and their common scale.

    Attributes:
        seed: seed of the entries' signs, below 2^16.
        scale: common scale of the rotated sums, above 0.
        above: True for each rotated sum above 0, shape (m,), m a power of two.
    """

    seed: int
    scale: np.float32
    above: MaskArray

    @property
    def most(self) -> float:
        """Upper bound of the magnitude of decoded entries."""
        return float(self.scale) * self.above.size

    def entries(self, count: int) -> Iterator[tuple[slice, FlatArray]]:
        """Decode `count` entries in parts: yield a range of entries, and their values."""
        sums = np.where(self.above, 1.0, -1.0)
        rotate(sums)
        sums *= float(self.scale)
        with np.errstate(over="ignore"):
            values = sums.astype(np.float32)
        del sums
        return entries_of(values, count, self.seed)


def random_sums(
    values: Callable[[slice], FlatArray], count: int, num_sums: int, key: Key
) -> RandomSums | None:
    """Return the random sums of `count` entries; None if all entries are 0, or so small that the scale is 0.

    Args:
        values: function that returns a part of the entries, finite.
        count: number of entries.
        num_sums: number of sums, a power of two.
        key: key from which the seed is drawn.
    """
    seed = new_seed(key)
    sums = added_up(values, count, num_sums, seed)
    square = float(np.square(sums).sum())
    rotate(sums)
    scale = np.float32(min(square / (float(np.abs(sums).sum()) or 1.0), float(LARGEST)))
    return RandomSums(seed, scale, sums > 0) if scale else None


def new_seed(key: Key) -> int:
    """Draw a seed for the signs of an update."""
    return int(key.bits(1)[0]) % (1 << _SEED_BITS)


def added_up(
    values: Callable[[slice], FlatArray], count: int, num_sums: int, seed: int
) -> NDArray[np.float64]:
    """Return the sums of the entries with their signs: entry e goes into sum e mod `num_sums`.

    For the arguments see `random_sums`.
    """
    sums = np.zeros(num_sums)
    for chunk, signs in _signs(seed, count, num_sums):
        signed = np.zeros(-(-signs.size // num_sums) * num_sums)
        signed[: signs.size] = values(chunk).astype(np.float64) * signs
        sums += signed.reshape(-1, num_sums).sum(0)
    return sums


def entries_of(sums: FlatArray, count: int, seed: int) -> Iterator[tuple[slice, FlatArray]]:
    """Yield sum times sign of each entry, in parts: a range of entries, and their values."""
    for chunk, signs in _signs(seed, count, sums.size):
        yield chunk, np.resize(sums, signs.size) * signs


def fitting_log(count: int, bits: float) -> int:
    """Return log2 of the number of sums that is nearest to `bits` for each of `count` entries."""
    return min(max(round(math.log2(max(1.0, count * bits))), _FEWEST_LOG), _MOST_LOG)


def most_log(count: int) -> int:
    """Return log2 of the largest useful number of sums: one bit for each entry."""
    return fitting_log(count, 1)


def rotate(vector: Vector) -> None:
    """Multiply `vector` by Sylvester's Hadamard matrix, in place.

    The shape is (m,), m a power of two. The result is exact for whole numbers.
    """
    width = 1
    while width < vector.size:
        first, second = vector.reshape(-1, 2, width).swapaxes(0, 1)
        difference = first - second
        first += second
        second[:] = difference
        width *= 2


def _signs(seed: int, count: int, num_sums: int) -> Iterator[tuple[slice, FlatArray]]:
    """Yield the signs of the entries, in parts that each begin with an entry of the first sum."""
    key, size = Key.of("sketch", seed), max(CHUNK, num_sums)
    for start in range(0, count, size):
        chunk = slice(start, min(start + size, count))
        draws = key.bits(-(-(chunk.stop - start) // 64), first=start // 64)
        bits = np.unpackbits(draws.astype("<u8").view(np.uint8), bitorder="little")[: chunk.stop - start]
        yield chunk, bits.astype(np.float32) * 2 - 1
