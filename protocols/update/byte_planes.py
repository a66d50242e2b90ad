"""Numbers with their bytes shuffled: all first bytes, then all second bytes, and so on.

Sign and exponent bytes of neighbours are alike and compress well; the low bytes of a mantissa do not.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def shuffled(array: NDArray[Any]) -> bytes:
    """The bytes of `array` plane by plane: its first bytes, its second bytes, ..."""
    return np.ascontiguousarray(np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8).T).tobytes()


def unshuffled(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """What `shuffled` made of an array of this type, shape (len(data) // dtype.itemsize,).

    The length of `data` is a multiple of the type's size; the caller has checked it.
    """
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
