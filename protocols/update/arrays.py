"""Arrays in a payload: [dtype, shape, data]; booleans as a bitmap, numbers with their bytes shuffled.

Reading trusts nothing: shapes and lengths are held against each other, and against what is left to unpack,
before anything is allocated.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, PacketNotFinite, PacketTooLarge

_DTYPES = {"?": np.dtype(bool), "f4": np.dtype("<f4"), "f8": np.dtype("<f8"), "i8": np.dtype("<i8")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_WireArray = tuple[
    Literal["?", "f4", "f8", "i8"],
    Annotated[list[Annotated[int, Meta(ge=0, lt=2**40)]], Meta(max_length=8)],
    bytes,
]

Array = NDArray[Any]


def pack(array: Array) -> tuple[str, tuple[int, ...], bytes]:
    """An array as it travels. Raises TypeError: of another type of element."""
    if array.dtype not in _NAMES:
        raise TypeError(f"cannot send an array of {array.dtype}")
    return _NAMES[array.dtype], array.shape, _bytes(np.ascontiguousarray(array))


def _bytes(array: Array) -> bytes:
    if array.dtype == bool:
        return np.packbits(array.ravel()).tobytes()
    return np.ascontiguousarray(array.reshape(-1, 1).view(np.uint8).T).tobytes()


@dataclass
class Arrays:
    """Reads the arrays of one payload.

    Attributes:
        finite: refuse NaN and infinite numbers.
        largest: most elements of one array; None: any number.
        left: bytes that all further ones together may take, unpacked; None: any number.
    """

    finite: bool = True
    largest: int | None = None
    left: int | None = None

    def read(self, obj: Any) -> Array:
        """Raises PacketCorrupt, PacketTooLarge, PacketNotFinite."""
        name, shape, data = _parts(obj)
        dtype, size = _DTYPES[name], math.prod(shape)
        if len(data) != (-(-size // 8) if name == "?" else size * dtype.itemsize):
            raise PacketCorrupt(f"array of shape {tuple(shape)} and type {name} with {len(data)} bytes")
        if not size and max(shape, default=0) > 2**31:
            raise PacketCorrupt(f"array of shape {tuple(shape)}")
        self._take(size, size * dtype.itemsize)
        if name == "?":
            bits = np.unpackbits(np.frombuffer(data, np.uint8), count=size)
            return bits.view(bool).reshape(shape)
        planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, size)
        array = np.ascontiguousarray(planes.T).view(dtype).reshape(shape)
        if self.finite and dtype.kind == "f" and not np.isfinite(array).all():
            raise PacketNotFinite("array holds NaN or infinite values")
        return array

    def _take(self, size: int, num_bytes: int) -> None:
        if self.largest is not None and size > self.largest:
            raise PacketTooLarge(f"array of {size} elements; the model has {self.largest}")
        if self.left is not None:
            self.left -= num_bytes
            if self.left < 0:
                raise PacketTooLarge("the arrays of a packet are larger than it may be altogether")


def _parts(obj: Any) -> tuple[str, list[int], bytes]:
    try:
        parts: tuple[str, list[int], bytes] = msgspec.convert(obj, _WireArray)
    except msgspec.ValidationError as problem:
        raise PacketCorrupt(f"array: {problem}") from None
    return parts
