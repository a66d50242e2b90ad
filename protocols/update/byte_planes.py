"""Numbers with their bytes shuffled: all first bytes, then all second bytes, and so on.

Sign and exponent bytes of neighbours are alike and compress well; the low bytes of a mantissa do not.
"""

from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.update.body import STEP, Source

_ROWS = 2**15  # numbers shuffled at a time: they stay in a processor's cache


def shuffled(array: NDArray[Any]) -> bytes:
    """The bytes of `array` plane by plane: its first bytes, its second bytes, ..."""
    return _places(array).T.tobytes()


def shuffle_into(array: NDArray[Any], out: memoryview | bytearray) -> None:
    """Write the bytes of `array` plane by plane; `out` has room for as many."""
    places = _places(array)
    planes = np.frombuffer(out, np.uint8).reshape(array.itemsize, -1)
    for start in range(0, len(places), _ROWS):
        planes[:, start : start + _ROWS] = places[start : start + _ROWS].T


def unshuffled(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """What `shuffled` made of an array of this type, shape (len(data) // dtype.itemsize,).

    The length of `data` is a multiple of the type's size; the caller has checked it.
    """
    return read_unshuffled(BytesIO(data), len(data) // dtype.itemsize, dtype)


def read_unshuffled(source: Source, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """What `shuffled` made of so many numbers of this type, plane by plane as the bytes come."""
    numbers = np.empty(size, dtype)
    places = numbers.view(np.uint8).reshape(-1, dtype.itemsize)
    for place in range(dtype.itemsize):
        for start in range(0, size, STEP):
            stop = min(start + STEP, size)
            places[start:stop, place] = np.frombuffer(source.read(stop - start), np.uint8)
    return numbers


def _places(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)
