"""Which samples a device tests, validates and trains on: decided for ever, by each sample's own content.

A sample's digest is BLAKE2b (16 bytes, personalised as `fleetune-sample`) over its label, a class as 8 bytes
and numbers as float32, and its input as stored (uint8, or float32), row by row, all little endian. The upper
53 bits of the digest's first half, as a number in [0, 1), decide about the test split, those of its second
half about validation: below the fraction it belongs there. Neither seeds, names, order nor the other samples have a say. So when a device
keeps the last thousand samples of a stream, nothing that it once trained on is ever tested on, and the other
way round; copies of a sample stay together; and a larger fraction takes samples over without giving any back.
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
    """Each sample's two numbers in [0, 1), for test and for validation, shape (n,) each.

    Args:
        x: inputs as a `Dataset` holds them, shape (n, ...).
        y: labels, shape (n,) or (n, ...).
        block: samples of one number overlap, shape (n,): the first of them decides for all, so that a block
            that grows changes no sides. None: each decides for itself.
    """
    if block is not None:
        _, first, places = np.unique(block, return_index=True, return_inverse=True)
        for_test, for_validation = split_draws(x[first], y[first])
        return for_test[places], for_validation[places]
    return draws_of_digests(b"".join(_digest(sample, label) for sample, label in zip(x, y, strict=True)))


def input_digest(sample: NDArray[np.generic]) -> bytes:
    """The digest of one input whose label may still come, or change: with -1 in the label's place."""
    return _digest(sample, _NO_LABEL)


def draws_of_digests(digests: bytes) -> tuple[Draws, Draws]:
    """What `split_draws` returns, of n digests one after the other."""
    halves = np.frombuffer(digests, "<u8").reshape(-1, 2) >> np.uint64(11)
    numbers = halves.astype(np.float64) * 2.0**-53
    return numbers[:, 0], numbers[:, 1]


def _digest(sample: NDArray[np.generic], label: NDArray[np.generic] | np.generic) -> bytes:
    kind = "<i8" if label.dtype.kind == "i" else "<f4"
    digest = hashlib.blake2b(label.astype(kind).tobytes(), digest_size=16, person=_PERSON)
    digest.update(sample.astype(sample.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.digest()


def select_below(numbers: Draws, fraction: float) -> NDArray[np.bool_]:
    """Which of `numbers` are below `fraction`, shape (n,).

    Where that is none, or all, those with the number nearest to the fraction change sides, so that there is
    one on each; copies of a sample have the same number and go together. They change back as soon as there is
    another. If all are alike, or the `fraction` is 0, none is.
    """
    if not fraction or np.unique(numbers).size < 2:
        return np.zeros(numbers.shape, np.bool_)
    found: NDArray[np.bool_] = numbers < fraction
    if found.any() != found.all():
        return found
    nearest: NDArray[np.bool_] = numbers == (numbers.max() if found.any() else numbers.min())
    return found ^ nearest
