"""Arrays in a payload: [dtype, shape, data]. Booleans are a bitmap; the bytes of numbers are shuffled.

Shuffling writes the first bytes of all numbers, then all second bytes, and so on. Neighbouring numbers have
similar sign and exponent bytes, which then compress well. The low mantissa bytes do not.

The dtype field may also hold the name of an encoding, for the values of a patch, or `CODED_MASK`, for a
compressed mask (`protocols.update.patch_values`).

The data come from a peer. Before any memory is allocated, shapes and lengths are checked against each other
and against the limits of the payload.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, PacketNotFinite, PacketTooLarge
from fleetune.protocols.finite import all_finite
from fleetune.protocols.one_line import flat
from fleetune.protocols.update.body import STEP, Source

FLOAT32 = "f4"
AS_IT_LIES = "="  # prefix of the dtype where the bytes are not shuffled
CODED_MASK = "?c"
_DTYPES = {"?": np.dtype(bool), FLOAT32: np.dtype("<f4"), "f8": np.dtype("<f8"), "i8": np.dtype("<i8")}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Array = NDArray[Any]
WireArray = tuple[str, list[int], bytes]  # dtype or name of an encoding, shape, data
PIECE_BYTES = 2**20
_ROWS = 2**15  # numbers shuffled at a time; they fit into a processor's cache


def shuffled(array: NDArray[Any]) -> bytes:
    """Return the bytes of `array` in shuffled order: all first bytes, then all second bytes, and so on."""
    return _places(array).T.tobytes()


def shuffle_into(array: NDArray[Any], out: memoryview | bytearray) -> None:
    """Write the shuffled bytes of `array` into `out`, which has the same number of bytes."""
    places = _places(array)
    planes = np.frombuffer(out, np.uint8).reshape(array.itemsize, -1)
    for start in range(0, len(places), _ROWS):
        planes[:, start : start + _ROWS] = places[start : start + _ROWS].T


def unshuffled(data: bytes, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the numbers whose shuffled bytes are `data`, shape (len(data) // dtype.itemsize,).

    The caller must check that the length is a multiple of the type's size.
    """
    return read_unshuffled(BytesIO(data), len(data) // dtype.itemsize, dtype)


def read_unshuffled(source: Source, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Read `size` numbers from `source`, which supplies their shuffled bytes."""
    numbers = np.empty(size, dtype)
    places = numbers.view(np.uint8).reshape(-1, dtype.itemsize)
    for place in range(dtype.itemsize):
        for start in range(0, size, STEP):
            stop = min(start + STEP, size)
            places[start:stop, place] = np.frombuffer(source.read(stop - start), np.uint8)
    return numbers


def _places(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(-1, 1).view(np.uint8)


def can_travel(array: Array) -> bool:
    """True if payloads and states can hold arrays of this element type."""
    return array.dtype in _NAMES


def dtype_name(array: Array) -> str:
    """Return the name of the array's element type. Raises TypeError if payloads cannot hold this type."""
    if array.dtype not in _NAMES:
        raise TypeError(f"cannot send an array of type {array.dtype}; use one of {', '.join(_DTYPES)}")
    return _NAMES[array.dtype]


def num_array_bytes(array: Array) -> int:
    """Return the number of bytes of the array's data in a payload."""
    return -(-array.size // 8) if array.dtype == bool else array.nbytes


def bytes_of(array: Array) -> memoryview:
    """Return the array's bytes in memory order, row by row."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def iter_pieces(array: Array) -> Iterator[memoryview]:
    """Yield an array's data, as `write_array` writes them, in pieces of at most `PIECE_BYTES`."""
    if array.dtype == bool:
        bits = array.reshape(-1)
        for start in range(0, bits.size, 8 * PIECE_BYTES):
            yield np.packbits(bits[start : start + 8 * PIECE_BYTES]).data
        return
    places = _places(array)
    for place in range(array.itemsize):
        for start in range(0, len(places), PIECE_BYTES):
            yield np.ascontiguousarray(places[start : start + PIECE_BYTES, place]).data


def write_array(array: Array, out: memoryview) -> None:
    """Write an array's data into `out`, which has `num_array_bytes` bytes."""
    if array.dtype == bool:
        out[:] = np.packbits(array.ravel()).tobytes()
    else:
        shuffle_into(array, out)


@dataclass
class Arrays:
    """Reads the arrays of one payload, and checks them against the payload's limits.

    Attributes:
        finite: True rejects NaN and infinite numbers.
        largest: largest number of elements of one array; None for no limit.
        left: memory in bytes that all further arrays may take together; None for no limit.
        plain: True if the bytes of arrays are not shuffled.
    """

    finite: bool = True
    largest: int | None = None
    left: int | None = None
    plain: bool = False

    def read(self, source: Source, name: str, shape: list[int], length: int) -> Array:
        """Read an array whose `length` bytes of data come next in `source`; the caller must pass it to
        `checked`.

        Raises:
            PacketCorrupt: the type is unknown, or an array of this type and shape has another number of
                bytes.
            PacketTooLarge, or any error of `source`.
        """
        lies = self.plain and name.startswith(AS_IT_LIES)
        name = name.removeprefix(AS_IT_LIES) if lies else name
        if name not in _DTYPES:
            raise PacketCorrupt(
                f"array of unknown type {flat(name)!r}; this program reads {', '.join(_DTYPES)}"
            )
        dtype, size = _DTYPES[name], math.prod(shape)
        fits = length == (-(-size // 8) if name == "?" else size * dtype.itemsize)
        if not fits or (not size and max(shape, default=0) > 2**31):
            raise PacketCorrupt(f"array of shape {tuple(shape)} and type {name} cannot have {length} bytes")
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
        """Return the array. Raises PacketNotFinite if its numbers must be finite and are not."""
        if self.finite and not all_finite(array):
            raise PacketNotFinite("array holds NaN or infinite values")
        return array

    def take(self, size: int, num_bytes: int) -> None:
        """Count an array against the limits before it is allocated. Raises PacketTooLarge."""
        if self.largest is not None and size > self.largest:
            raise PacketTooLarge(f"array of {size} elements, but the model has only {self.largest}")
        if self.left is not None:
            self.left -= num_bytes
            if self.left < 0:
                raise PacketTooLarge("the payload's arrays take more memory than its limit allows")


def _read_as_it_lies(source: Source, size: int, dtype: np.dtype[Any]) -> Array:
    numbers = np.empty(size, dtype)
    places = numbers.view(np.uint8)
    for chunk in _chunks(places.size):
        places[chunk] = np.frombuffer(source.read(chunk.stop - chunk.start), np.uint8)
    return numbers


def _chunks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + STEP, size)) for start in range(0, size, STEP))
