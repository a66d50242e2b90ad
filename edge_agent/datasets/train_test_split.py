"""The train, validation and test split of a device's samples. Each sample's own content decides, for good.

A sample's digest is BLAKE2b (16 bytes, personalised as `fleetune-sample`). It covers the label, a class as
8 bytes or numbers as float32, and then the input as stored (uint8 or float32), row by row. All is little
endian. The upper 53 bits of the digest's first half are the sample's test draw, a number in [0, 1). Those of
the second half are its validation draw. A sample whose draw is below the fraction belongs to that part.

Seeds, names, order and the other samples have no influence. So a device that keeps the last thousand samples
of a stream never tests on a sample that it once trained on. Copies of a sample stay together. A larger
fraction adds samples to a part and gives none back.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

Draws = NDArray[np.float64]

_PERSON = b"fleetune-sample"
_NO_LABEL = np.asarray(-1, np.int64)


def split_draws(
    x: NDArray[np.generic],
    y: NDArray[np.int64] | NDArray[np.float32],
    block: NDArray[np.int64] | None = None,
) -> tuple[Draws, Draws]:
    """Return each sample's draws in [0, 1) for the test split and the validation split, shape (n,) each.

    Args:
        x: inputs of a `Dataset`, shape (n, ...).
        y: labels, shape (n,) or (n, ...).
        block: block number of each sample, shape (n,). The first sample of a block decides for the whole
            block, so that a growing block keeps its part. None: each sample decides for itself.
    """
    if block is not None:
        _, first, places = np.unique(block, return_index=True, return_inverse=True)
        for_test, for_validation = split_draws(x[first], y[first])
        return for_test[places], for_validation[places]
    return draws_of_digests(b"".join(_digest(sample, label) for sample, label in zip(x, y, strict=True)))


def input_digest(sample: NDArray[np.generic]) -> bytes:
    """Return the digest of an input alone, with -1 as its label, so that a late or changed label has no
    effect.
    """
    return _digest(sample, _NO_LABEL)


def draws_of_digests(digests: bytes) -> tuple[Draws, Draws]:
    """Return the two draws of each of n digests, which follow each other in `digests`. See `split_draws`."""
    halves = np.frombuffer(digests, "<u8").reshape(-1, 2) >> np.uint64(11)
    numbers = halves.astype(np.float64) * 2.0**-53
    return numbers[:, 0], numbers[:, 1]


def _digest(sample: NDArray[np.generic], label: NDArray[np.generic] | np.generic) -> bytes:
    kind = "<i8" if label.dtype.kind == "i" else "<f4"
    digest = hashlib.blake2b(label.astype(kind).tobytes(), digest_size=16, person=_PERSON)
    digest.update(sample.astype(sample.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.digest()


def select_below(numbers: Draws, fraction: float) -> NDArray[np.bool_]:
    """Mark the draws below `fraction`, shape (n,).

    If that were none or all, the draws nearest to the fraction change sides, so that both sides have a
    sample. Copies of a sample have the same draw, so they stay together. If all draws are equal, or
    `fraction` is 0, none is marked.
    """
    if not fraction or np.unique(numbers).size < 2:
        return np.zeros(numbers.shape, np.bool_)
    found: NDArray[np.bool_] = numbers < fraction
    if found.any() != found.all():
        return found
    nearest: NDArray[np.bool_] = numbers == (numbers.max() if found.any() else numbers.min())
    return found ^ nearest
