"""Published compressors of a step, for comparison only.

A step is a flat float32 vector of shape (n,): the change by local training plus the residual. Each function
returns the step that the coordinator decodes, and its size in bytes. Sizes are those of the papers' own
coders, without a frame.
"""

import math
from collections.abc import Callable

import numpy as np

from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.random_sums import rotate

Compressor = Callable[[FlatArray, Key], tuple[FlatArray, float]]

_LEAST_PART = 256  # minimum number of entries that share a scale in EDEN
_GOLDEN = (math.sqrt(5) - 1) / 2


def stc(density: float) -> Compressor:
    """Sparse ternary compression (Sattler et al. 2019, arXiv:1903.02891, Alg. 1 and section V-C).

    It sends the largest entries, all with their mean magnitude, and the distances between them in Golomb's
    code (eq. 15 to 17).
    """
    bits_per_entry = golomb_bits(density) + 1  # and a sign

    def compress(step: FlatArray, key: Key) -> tuple[FlatArray, float]:  # noqa: ARG001 - nothing is drawn
        count = max(1, int(step.size * density))
        chosen = np.argpartition(np.abs(step), step.size - count)[step.size - count :]
        mean = np.abs(step[chosen]).mean()
        sent = np.zeros_like(step)
        sent[chosen] = np.sign(step[chosen]) * mean
        return sent, 4 + count * bits_per_entry / 8

    return compress


def golomb_bits(density: float) -> float:
    """Mean bits of a distance in the best Golomb code, if an entry is present with probability `density`."""
    remainder_bits = 1 + math.floor(math.log2(math.log(_GOLDEN) / math.log1p(-density)))
    return remainder_bits + 1 / (1 - math.pow(1 - density, 2**remainder_bits))


def eden(step: FlatArray, key: Key) -> tuple[FlatArray, float]:
    """EDEN at one bit an entry (Vargaftik et al. 2022, arXiv:2108.08842, Alg. 1).

    At one bit it is DRIVE's unbiased scale: signs after a random rotation, and a scale that preserves the
    mean. The rotation is a Hadamard transform with random signs, whose sizes are powers of two. So the step
    is cut into the fewest such parts, each with its own scale. Only a last part below `_LEAST_PART` is
    padded, because padding a whole step would cost up to another bit an entry.
    """
    sent, num_bytes, start = np.empty_like(step), 0.0, 0
    while start < step.size:
        left = step.size - start
        size = max(_LEAST_PART, 1 << (left.bit_length() - 1))
        part = slice(start, start + min(size, left))
        sent[part] = _rotated_signs(step[part], size, key.child(start))
        num_bytes += 4 + size / 8
        start = part.stop
    return sent, num_bytes


def eden_of_few(share: float) -> Compressor:
    """EDEN below one bit: a random share of the entries has one bit each, scaled up by the inverse share."""

    def compress(step: FlatArray, key: Key) -> tuple[FlatArray, float]:
        chosen = key.child("chosen").sample(max(1, round(share * step.size)), step.size)
        decoded, num_bytes = eden(step[chosen], key)
        sent = np.zeros_like(step)
        sent[chosen] = decoded * np.float32(step.size / chosen.size)
        return sent, num_bytes

    return compress


def _rotated_signs(part: FlatArray, size: int, key: Key) -> FlatArray:
    signs = np.where(key.uniform(size) < 0.5, np.float32(-1), np.float32(1))
    padded = np.zeros(size, np.float32)
    padded[: part.size] = part
    rotated = hadamard(padded * signs)
    total = float(np.abs(rotated).sum(dtype=np.float64))
    scale = float(np.dot(rotated, rotated)) / total if total else 0.0
    back = hadamard(np.where(rotated < 0, np.float32(-scale), np.float32(scale))) * signs
    return back[: part.size]


def hadamard(vector: FlatArray) -> FlatArray:
    """The orthonormal Walsh-Hadamard transform; its own inverse. The size is a power of two."""
    values = vector.copy()
    rotate(values)
    return values / np.float32(math.sqrt(vector.size))


def qsgd(levels: int, bucket: int = 512) -> Compressor:
    """QSGD (Alistarh et al. 2017, arXiv:1610.02132, section 3.1).

    Magnitudes are rounded at random to `levels` levels of a bucket's norm. Bytes are those of Theorem 3.2's
    code with Elias gamma: distances, signs, levels.
    """

    def compress(step: FlatArray, key: Key) -> tuple[FlatArray, float]:
        starts = np.arange(0, step.size, bucket)
        norms = np.sqrt(np.add.reduceat(step.astype(np.float64) ** 2, starts))
        norm = np.repeat(norms, np.diff([*starts, step.size]))
        scaled = levels * np.abs(step) / np.maximum(norm, np.finfo(np.float64).tiny)
        whole = np.floor(scaled)
        level = whole + (key.uniform(step.size) < scaled - whole)
        sent = (np.sign(step) * norm * level / levels).astype(np.float32)
        hits = np.flatnonzero(level)
        distances = np.diff(hits, prepend=-1)
        bits = _gamma_bits(distances) + _gamma_bits(level[hits]) + hits.size
        return sent, 4 * starts.size + bits / 8

    return compress


def _gamma_bits(numbers: FlatArray) -> float:
    return float((2 * np.floor(np.log2(numbers)) + 1).sum()) if len(numbers) else 0.0
