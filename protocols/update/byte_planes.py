"""Byte shuffle: store the first bytes of all numbers, then all second bytes, and so on.

Neighbouring numbers have similar sign and exponent bytes, which then compress well. The low mantissa bytes do
not.
"""

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.update.body import STEP, Source

_ROWS = 2**15  # numbers shuffled at a time; they fit into a processor's cache


def shuffled(array: NDArray[Any]) -> bytes:
    """The shuffled bytes of `array`."""
    return _places(array).T.tobytes()


def shuffle_into(array: NDArray[Any], out: memoryview | bytearray) -> None:
    """Write the shuffled bytes of `array` into `out`, which has the same length."""
    places = _places(array)
    planes = np.frombuffer(out, np.uint8).reshape(array.itemsize, -1)
    for start in range(0, len(places), _ROWS):
        planes[:, start : start + _ROWS] = places[start : start + _ROWS].T


def unshuffled(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """The numbers whose shuffled bytes are `data`, shape (len(data) // dtype.itemsize,).

    The caller must check that the length is a multiple of the type's size.
    """
    return read_unshuffled(BytesIO(data), len(data) // dtype.itemsize, dtype)


def read_unshuffled(source: Source, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Read `size` numbers whose shuffled bytes come next in `source`."""
    numbers = np.empty(size, dtype)
    places = numbers.view(np.uint8).reshape(-1, dtype.itemsize)
    for place in range(dtype.itemsize):
        for start in range(0, size, STEP):
            stop = min(start + STEP, size)
            places[start:stop, place] = np.frombuffer(source.read(stop - start), np.uint8)
    return numbers


def _places(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)
