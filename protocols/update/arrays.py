"""Arrays in a payload: [dtype, shape, data]; booleans as a bitmap, numbers with their bytes shuffled.

Where an encoding wrote the values of a patch, its name stands in the place of the dtype
(`protocols.update.patch_values`).

Reading trusts nothing: shapes and lengths are held against each other, and against what is left to unpack,
before anything is allocated.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, PacketNotFinite, PacketTooLarge
from fleetune.protocols.update.byte_planes import shuffled, unshuffled

FLOAT32 = "f4"
_DTYPES = {"?": np.dtype(bool), FLOAT32: np.dtype("<f4"), "f8": np.dtype("<f8"), "i8": np.dtype("<i8")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Array = NDArray[Any]
WireArray = tuple[
    Annotated[str, Meta(max_length=32)],  # the dtype, or the encoding of a patch's values
    Annotated[list[Annotated[int, Meta(ge=0, lt=2**40)]], Meta(max_length=8)],
    bytes,
]


def pack(array: Array) -> WireArray:
    """An array as it travels. Raises TypeError: of another type of element."""
    if array.dtype not in _NAMES:
        raise TypeError(f"cannot send an array of {array.dtype}")
    data = np.packbits(array.ravel()).tobytes() if array.dtype == bool else shuffled(array)
    return _NAMES[array.dtype], list(array.shape), data


def parts_of(obj: Any) -> WireArray:
    """What `pack` or an encoding made, as it came off the wire. Raises PacketCorrupt."""
    try:
        parts: WireArray = msgspec.convert(obj, WireArray)
    except msgspec.ValidationError as problem:
        raise PacketCorrupt(f"array: {problem}") from None
    return parts


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

    def read(self, parts: WireArray) -> Array:
        """Raises PacketCorrupt, PacketTooLarge, PacketNotFinite."""
        name, shape, data = parts
        if name not in _DTYPES:
            raise PacketCorrupt(f"array of type {name!r}, which this side does not know")
        dtype, size = _DTYPES[name], math.prod(shape)
        if len(data) != (-(-size // 8) if name == "?" else size * dtype.itemsize):
            raise PacketCorrupt(f"array of shape {tuple(shape)} and type {name} with {len(data)} bytes")
        if not size and max(shape, default=0) > 2**31:
            raise PacketCorrupt(f"array of shape {tuple(shape)}")
        self.take(size, size * dtype.itemsize)
        if name == "?":
            bits = np.unpackbits(np.frombuffer(data, np.uint8), count=size)
            return bits.view(bool).reshape(shape)
        array = unshuffled(data, dtype).reshape(shape)
        if self.finite and dtype.kind == "f" and not np.isfinite(array).all():
            raise PacketNotFinite("array holds NaN or infinite values")
        return array

    def take(self, size: int, num_bytes: int) -> None:
        """Count an array of so many elements that is about to be made. Raises PacketTooLarge."""
        if self.largest is not None and size > self.largest:
            raise PacketTooLarge(f"array of {size} elements; the model has {self.largest}")
        if self.left is not None:
            self.left -= num_bytes
            if self.left < 0:
                raise PacketTooLarge("the arrays of a packet are larger than it may be altogether")
