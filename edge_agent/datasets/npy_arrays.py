"""Reads arrays in .npy and .npz files, with a limit on their size that is checked before reading.

NumPy trusts the sizes that a file announces, so an archive of 1 MB may take 1 GB of memory. Here, a file is
refused if its arrays exceed a limit, and arrays can be read a few rows at a time.
"""

import io
import math
import zipfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fleetune.protocols.errors import DataError, FleetuneError
from fleetune.protocols.input_files import check_stop, memory_limit_bytes, open_input, too_large
from fleetune.protocols.one_line import flat

MAX_AXES = 32
MAX_HEADER_BYTES = 10_000  # numpy refuses longer ones too, but only after it has read them
_MAX_BYTES = 2**62
_PIECE_BYTES = 2**20
_PLAIN = "biufcSUMm"  # kinds of dtypes that hold numbers, texts or times
_READ_HEADER = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_LENGTH_BYTES = {(1, 0): 2, (2, 0): 4}  # bytes of the field that holds the header's length
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # compression methods of numpy.savez


class _NoNpyError(ValueError):
    """The file is not a .npy or .npz file of plain arrays; the message gives the reason."""


@dataclass(frozen=True)
class Header:
    """The header of a .npy file.

    Attributes:
        dtype: dtype of the array.
        shape: shape of the array.
        by_columns: True if the values are in Fortran's order.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    by_columns: bool

    @property
    def num_bytes(self) -> int:
        """Size of the array in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Size of one row, which is one index of the first axis, in bytes."""
        return self.dtype.itemsize * math.prod(self.shape[1:])


def read_npy(path: Path) -> NDArray[Any]:
    """Read the array in a .npy file.

    Raises:
        DataError: see `open_input`; or the file is no .npy file, is damaged, or exceeds
            `memory_limit_bytes()`.
    """
    limit = memory_limit_bytes()
    with open_input(path) as file, _damaged(path, "npy"):
        header = read_header(file)
        if header.num_bytes > limit:
            raise DataError(too_large(path, header.num_bytes, limit))
        return _read_array(file, header)


class NpzFile:
    """An open .npz file.

    Attributes:
        headers: header of each requested array in the file, by name.
        names: names of all arrays in the file.
    """

    def __init__(
        self, path: Path, archive: zipfile.ZipFile, headers: dict[str, Header], names: Sequence[str]
    ) -> None:
        self._path, self._archive, self.headers, self.names = path, archive, headers, names

    def read(self, name: str) -> NDArray[Any]:
        """Read an array. Raises DataError if it is damaged."""
        with _damaged(self._path), self._archive.open(f"{name}.npy") as file:
            found = _read_array(file, read_header(file))
            _check_end(file)
            return found

    def rows(self, name: str, count: int) -> Iterator[NDArray[Any]]:
        """Read an array `count` rows at a time, or at once if it is in Fortran's order. Raises as `read`."""
        header = self.headers[name]
        if header.by_columns and len(header.shape) > 1:
            whole = self.read(name)
            yield from (whole[start : start + count] for start in range(0, len(whole), count))
            return
        with self._archive.open(f"{name}.npy") as file:
            with _damaged(self._path):
                read_header(file)
            for start in range(0, header.shape[0], count):
                shape = (min(count, header.shape[0] - start), *header.shape[1:])
                with _damaged(self._path):
                    piece = _read_array(file, Header(header.dtype, shape, by_columns=False))
                yield piece
            with _damaged(self._path):
                _check_end(file)


@contextmanager
def open_npz(path: Path, wanted: Collection[str], max_bytes: int | None = None) -> Iterator[NpzFile]:
    """Open an .npz file, as numpy.savez and savez_compressed write it.

    Args:
        path: path of the file.
        wanted: names of the arrays to read; others are ignored.
        max_bytes: largest total size of these arrays; None: `memory_limit_bytes()`.

    Raises:
        DataError: see `open_input`; or it is not such a file, is damaged, or its arrays exceed `max_bytes`.
    """
    limit = memory_limit_bytes() if max_bytes is None else max_bytes
    with ExitStack() as opened:
        file = opened.enter_context(open_input(path, limit))
        with _damaged(path):
            if file.read(6) == npy.MAGIC_PREFIX:
                raise _NoNpyError("it is a single array; write numpy.savez(path, x=..., y=...)")
            archive = opened.enter_context(zipfile.ZipFile(file))
            entries = _entries(archive)
            headers = {name: _header(archive, entries[name]) for name in entries if name in wanted}
        announced = sum(header.num_bytes for header in headers.values())
        if announced > limit:
            raise DataError(too_large(path, announced, limit, "unpacked"))
        yield NpzFile(path, archive, headers, tuple(entries))


def _entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the entries of the archive by the names of their arrays."""
    found: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        name = entry.filename.removesuffix(".npy")
        if name in found:
            raise _NoNpyError(f"two arrays have the name {name[:100]!r}")
        if name != entry.filename:
            found[name] = entry
    return found


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Header:
    check_stop()
    if entry.compress_type not in _METHODS or entry.flag_bits & 1:
        raise _NoNpyError(f"{entry.filename} has a compression that numpy.savez does not use")
    with archive.open(entry) as file:
        return read_header(file)


def read_header(file: IO[bytes]) -> Header:
    """Read the header of a .npy file from its start.

    Raises:
        ValueError: it is not valid, has more than `MAX_HEADER_BYTES`, or is not of plain values.
    """
    version = npy.read_magic(file)
    if version not in _READ_HEADER:
        raise _NoNpyError(f"its version is {version[0]}.{version[1]}; expected 1.0 or 2.0")
    shape, by_columns, dtype = _READ_HEADER[version](_header_bytes(file, _LENGTH_BYTES[version]))
    if dtype.kind not in _PLAIN or not dtype.itemsize:
        raise _NoNpyError(f"an array holds {str(dtype)[:100]}; it must hold numbers or texts")
    if len(shape) > MAX_AXES or any(not 0 <= one < _MAX_BYTES for one in shape):
        raise _NoNpyError(f"its header announces the shape {shape}")
    if dtype.itemsize * math.prod(max(one, 1) for one in shape) > _MAX_BYTES:
        raise _NoNpyError(f"its header announces the shape {shape}")
    return Header(dtype, shape, by_columns)


def _header_bytes(file: IO[bytes], length_bytes: int) -> io.BytesIO:
    """Return the header and the field before it, which holds its length."""
    length = file.read(length_bytes)
    num_bytes = int.from_bytes(length, "little")
    if num_bytes > MAX_HEADER_BYTES:
        raise _NoNpyError(f"its header has {num_bytes:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
    return io.BytesIO(length + file.read(num_bytes))


def _read_array(file: IO[bytes], header: Header) -> NDArray[Any]:
    """Read the array after its header."""
    data, at = bytearray(header.num_bytes), 0
    while at < len(data):
        check_stop()
        part = file.read(min(_PIECE_BYTES, len(data) - at))
        if not part:
            raise _NoNpyError("an array is cut off")
        data[at : at + len(part)] = part
        at += len(part)
    return np.ndarray(header.shape, header.dtype, data, order="F" if header.by_columns else "C")


def _check_end(file: IO[bytes]) -> None:
    """Read to the end of an entry, because zipfile tests the checksum only there."""
    if file.read(1):
        raise _NoNpyError("there are more bytes than the array has")


@contextmanager
def _damaged(path: Path, kind: str = "npz") -> Iterator[None]:
    """Turn every error in this context into a DataError; damaged archives raise errors of many types."""
    try:
        yield
    except FleetuneError:
        raise
    except Exception as problem:  # noqa: BLE001 - see above
        words = flat(problem)[:200] or type(problem).__name__
        raise DataError(f"{path} is not a readable .{kind} file of plain arrays ({words})") from None
