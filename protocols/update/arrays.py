"""Arrays in a payload: [dtype, shape, data]; booleans as a bitmap, numbers with their bytes shuffled.

Where an encoding wrote the values of a patch, its name stands in the place of the dtype, and `CODED_MASK`
where booleans are coded (`protocols.update.patch_values`).

Reading trusts nothing: shapes and lengths are held against each other, and against what is left to unpack,
before anything is allocated.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, PacketNotFinite, PacketTooLarge
from fleetune.protocols.update.body import STEP, Source
from fleetune.protocols.update.byte_planes import read_unshuffled, shuffle_into

FLOAT32 = "f4"
AS_IT_LIES = "="  # before the name of an array whose bytes are as they lie in memory
CODED_MASK = "?c"
_DTYPES = {"?": np.dtype(bool), FLOAT32: np.dtype("<f4"), "f8": np.dtype("<f8"), "i8": np.dtype("<i8")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Array = NDArray[Any]
WireArray = tuple[
    Annotated[str, Meta(max_length=32)],  # the dtype, or the encoding of a patch's values
    Annotated[list[Annotated[int, Meta(ge=0, lt=2**40)]], Meta(max_length=8)],
    bytes,
]


def can_travel(array: Array) -> bool:
    """Whether an array's elements are of a type that is kept and sent."""
    return array.dtype in _NAMES


def dtype_name(array: Array) -> str:
    """Of an array that may travel. Raises TypeError: of another type of element."""
    if array.dtype not in _NAMES:
        raise TypeError(f"cannot send an array of {array.dtype}")
    return _NAMES[array.dtype]


def num_array_bytes(array: Array) -> int:
    """How long an array's data are."""
    return -(-array.size // 8) if array.dtype == bool else array.nbytes


def bytes_of(array: Array) -> memoryview:
    """Its bytes as they lie in memory, row by row."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def write_array(array: Array, out: memoryview) -> None:
    """Write an array's data; `out` has room for `num_array_bytes`."""
    if array.dtype == bool:
        out[:] = np.packbits(array.ravel()).tobytes()
    else:
        shuffle_into(array, out)


def parts_of(obj: Any) -> WireArray:
    """An array's name, shape and data, as they came off the wire. Raises PacketCorrupt."""
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
        plain: they may be as they lie in memory, too.
    """

    finite: bool = True
    largest: int | None = None
    left: int | None = None
    plain: bool = False

    def read(self, parts: WireArray) -> Array:
        """Raises PacketCorrupt, PacketTooLarge, PacketNotFinite."""
        name, shape, data = parts
        if name not in _DTYPES:
            raise PacketCorrupt(f"array of type {name!r}, which this side does not know")
        array = self.read_from(BytesIO(data), name, shape, len(data))
        if array is None:
            raise PacketCorrupt(f"array of shape {tuple(shape)} and type {name} with {len(data)} bytes")
        return self.checked(array)

    def read_from(self, source: Source, name: str, shape: list[int], length: int) -> Array | None:
        """An array whose data, of this length, come next, not yet `checked`; None: there is none of this type
        and shape with so many bytes, and none is read.

        Raises:
            PacketTooLarge, or whatever `source` raises.
        """
        lies = self.plain and name.startswith(AS_IT_LIES)
        name = name.removeprefix(AS_IT_LIES) if lies else name
        if name not in _DTYPES:
            return None
        dtype, size = _DTYPES[name], math.prod(shape)
        if length != (-(-size // 8) if name == "?" else size * dtype.itemsize):
            return None
        if not size and max(shape, default=0) > 2**31:
            return None
        self.take(size, size * dtype.itemsize)
        if lies and name != "?":
            return _read_as_it_lies(source, size, dtype).reshape(shape)
        if name != "?":
            return read_unshuffled(source, size, dtype).reshape(shape)
        bits = np.empty(size, np.uint8)
        for chunk in _chunks(size):
            packed = np.frombuffer(source.read(-(-(chunk.stop - chunk.start) // 8)), np.uint8)
            bits[chunk] = np.unpackbits(packed, count=chunk.stop - chunk.start)
        return bits.view(bool).reshape(shape)

    def checked(self, array: Array) -> Array:
        """The array, if its numbers are what they have to be. Raises PacketNotFinite."""
        if self.finite and not all_finite(array):
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


def all_finite(array: Array) -> bool:
    """Whether no number is NaN or infinite, found without a copy."""
    if array.dtype.kind != "f":
        return True
    numbers = array.reshape(-1)
    return all(np.isfinite(numbers[chunk]).all() for chunk in _chunks(numbers.size))


def _read_as_it_lies(source: Source, size: int, dtype: np.dtype[Any]) -> Array:
    numbers = np.empty(size, dtype)
    places = numbers.view(np.uint8)
    for chunk in _chunks(places.size):
        places[chunk] = np.frombuffer(source.read(chunk.stop - chunk.start), np.uint8)
    return numbers


def _chunks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + STEP, size)) for start in range(0, size, STEP))
