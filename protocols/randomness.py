"""Random draws that are equal on coordinator, agent and simulator, in any language.

A `Key` is 64 bits. Keys are derived, never advanced: `Key.of("fleetune", seed).child("round", 3)` is the same
on every machine, and two different paths of names never share a stream.

The definition, for agents in other languages:

- A key is the first 8 bytes (little endian) of SHA-256 over the parts of its path. Each part is UTF-8 text
  preceded by its length in bytes as 4 bytes little endian. Integers are written in decimal. `key.child(...)`
  starts with the parent's value in decimal.
- Draw i (from 0) of a key is the SplitMix64 output at counter i: z = key + (i + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9; z = (z ^ (z >> 27)) * 0x94D049BB133111EB; z ^ (z >> 31).
- A uniform number in [0, 1) is the upper 53 bits of a draw times 2^-53.
- Normal number i comes from the uniform numbers u = 2i and v = 2i + 1: sqrt(-2 ln(1 - u)) cos(2 pi v).
- A permutation of n orders 0..n-1 by their draws, ties by index. A sample of k of n is the sorted first k of
  that permutation.
"""

import hashlib
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Key:
    """A stream of random numbers, addressed by a path of names."""

    value: int

    @classmethod
    def of(cls, *path: int | str) -> Self:
        """Return the key at `path`, e.g. `Key.of("fleetune", seed)`."""
        digest = hashlib.sha256()
        for part in path:
            text = str(part).encode()
            digest.update(len(text).to_bytes(4, "little") + text)
        return cls(int.from_bytes(digest.digest()[:8], "little"))

    def child(self, *path: int | str) -> Self:
        """Return the key below this one at `path`."""
        return self.of(self.value, *path)

    def bits(self, count: int, first: int = 0) -> NDArray[np.uint64]:
        """Return `count` draws from draw `first` on, 64 bits each, shape (count,)."""
        with np.errstate(over="ignore"):
            z = np.uint64(self.value) + np.arange(first + 1, first + count + 1, dtype=np.uint64) * _GOLDEN
            z = (z ^ (z >> np.uint64(30))) * _MIX_1
            z = (z ^ (z >> np.uint64(27))) * _MIX_2
            return z ^ (z >> np.uint64(31))

    def uniform(self, count: int, first: int = 0) -> NDArray[np.float64]:
        """Return `count` numbers in [0, 1) from draw `first` on, shape (count,)."""
        return uniforms(self.bits(count, first))

    def normal(self, count: int, first: int = 0) -> NDArray[np.float64]:
        """Return `count` normal numbers from number `first` on, mean 0 and deviation 1, shape (count,)."""
        return normals(self.bits(2 * count, 2 * first))

    def permutation(self, count: int) -> NDArray[np.intp]:
        """Return the numbers 0..count-1 in random order, shape (count,)."""
        return np.argsort(self.bits(count), kind="stable")

    def sample(self, count: int, of: int) -> NDArray[np.intp]:
        """Return `count` distinct numbers out of 0..of-1, ascending, shape (count,)."""
        return np.sort(self.permutation(of)[:count])

    def generator(self) -> np.random.Generator:
        """Return a NumPy generator for other distributions (data partitions, first weights, augmentation).

        Never for draws that both sides must make alike.
        """
        return np.random.Generator(np.random.Philox(key=self.value))


def uniforms(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each draw of 64 bits, same shape."""
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def normals(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a normal number, mean 0 and deviation 1, for each two draws of 64 bits: shape (n,) for (2n,)."""
    length, turn = uniforms(bits).reshape(-1, 2).T
    found: NDArray[np.float64] = np.sqrt(-2 * np.log1p(-length)) * np.cos(2 * np.pi * turn)
    return found
