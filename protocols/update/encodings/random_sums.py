"""Many entries told by few bits, at random and right on average.

Each entry has a random sign and goes into one of few sums (a count sketch: Charikar et al. 2002). Of these
sums, rotated by a Hadamard transform, the signs are sent, and one scale for all (DRIVE, Vargaftik et al.
2021, arXiv:2105.08339, with its unbiased scale). An entry is read as its sum times its sign: itself, and all
others of its sum as noise. Memory is that of the sums and of one chunk.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.chunks import CHUNK, LARGEST

NOISE = math.pi / 2  # squared, for one entry a sum: others of its sum, and what signs lose of the sums
_SEED_BITS = 16
_FEWEST_LOG, _MOST_LOG = 4, 26  # of sums

Vector = NDArray[np.float64] | NDArray[np.float32]


@dataclass(frozen=True)
class RandomSums:
    """Sums of entries with random signs.

    Attributes:
        seed: of the signs, below 2^16.
        scale: of the rotated sums, above 0.
        above: which of the rotated sums are positive, shape (m,), m a power of two.
    """

    seed: int
    scale: np.float32
    above: MaskArray

    @property
    def most(self) -> float:
        """No entry that is read is larger."""
        return float(self.scale) * self.above.size

    def entries(self, count: int) -> Iterator[tuple[slice, FlatArray]]:
        """What is read of so many entries, in parts: which, and their values."""
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
    """The sums of `count` entries; None: all of these are 0, or as good as that.

    Args:
        values: of a part of the entries, finite.
        count: of all of them.
        num_sums: a power of two.
        key: of the seed.
    """
    seed = new_seed(key)
    sums = added_up(values, count, num_sums, seed)
    square = float(np.square(sums).sum())
    rotate(sums)
    scale = np.float32(min(square / (float(np.abs(sums).sum()) or 1.0), float(LARGEST)))
    return RandomSums(seed, scale, sums > 0) if scale else None


def new_seed(key: Key) -> int:
    """Of the signs of an update."""
    return int(key.bits(1)[0]) % (1 << _SEED_BITS)


def added_up(
    values: Callable[[slice], FlatArray], count: int, num_sums: int, seed: int
) -> NDArray[np.float64]:
    """Entries with their signs, entry e in sum e mod `num_sums`; arguments as of `random_sums`."""
    sums = np.zeros(num_sums)
    for chunk, signs in _signs(seed, count, num_sums):
        signed = np.zeros(-(-signs.size // num_sums) * num_sums)
        signed[: signs.size] = values(chunk).astype(np.float64) * signs
        sums += signed.reshape(-1, num_sums).sum(0)
    return sums


def entries_of(sums: FlatArray, count: int, seed: int) -> Iterator[tuple[slice, FlatArray]]:
    """Each entry's sum with the entry's sign, in parts: which entries, and these."""
    for chunk, signs in _signs(seed, count, sums.size):
        yield chunk, np.resize(sums, signs.size) * signs


def fitting_log(count: int, bits: float) -> int:
    """log2 of how many sums are nearest to so many bits for each of `count` entries."""
    return min(max(round(math.log2(max(1.0, count * bits))), _FEWEST_LOG), _MOST_LOG)


def most_log(count: int) -> int:
    """The largest that anybody has a use for."""
    return fitting_log(count, 1)


def rotate(vector: Vector) -> None:
    """Sylvester's Hadamard matrix times `vector`, in place, shape (m,), m a power of two; exact for whole
    numbers.
    """
    width = 1
    while width < vector.size:
        first, second = vector.reshape(-1, 2, width).swapaxes(0, 1)
        difference = first - second
        first += second
        second[:] = difference
        width *= 2


def _signs(seed: int, count: int, num_sums: int) -> Iterator[tuple[slice, FlatArray]]:
    """Of entries, in parts that begin with the first sum's."""
    key, size = Key.of("sketch", seed), max(CHUNK, num_sums)
    for start in range(0, count, size):
        chunk = slice(start, min(start + size, count))
        draws = key.bits(-(-(chunk.stop - start) // 64), first=start // 64)
        bits = np.unpackbits(draws.astype("<u8").view(np.uint8), bitorder="little")[: chunk.stop - start]
        yield chunk, bits.astype(np.float32) * 2 - 1
