"""Shared format of encodings that write differences: a tag, chunks of values, and byte streams in each chunk.

The first byte is 1 if values were written as differences to a reference, and 0 if there was no reference.
Chunks of `CHUNK` values follow, the last one shorter. Each chunk is read by itself, so both sides need the
scratch space of one chunk only.

A stream is its stored length (4 bytes, little endian) and the stored bytes. The stored bytes are a zstd frame
with its content size if that is shorter, else the content itself. The reader knows the unpacked length of
each stream, which distinguishes the two. Bytes: docs/wire.md, *Chunks and streams*.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.body import Source
from fleetune.protocols.update.encodings.encoding import Encoded, Encoding, Known

CHUNK = 2**16  # values; scratch arrays of this size stay in the processor's cache
WITHOUT_REFERENCE, WITH_REFERENCE = b"\0", b"\1"
AS_THEY_ARE = 0  # first byte of encodings without chunks if the values themselves follow
LARGEST = np.finfo(np.float32).max
_ZSTD_LEVEL = 1  # higher levels gain nothing on such bytes: their matches are accidental

Bytes = NDArray[np.uint8]


def chunks(count: int) -> Iterator[slice]:
    """Yield the range of each chunk of `count` values."""
    return (slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def tag_of(known: Known) -> bytes:
    """Return the first byte of encoded values: 1 if they are differences to a reference, else 0."""
    return WITHOUT_REFERENCE if known.reference is None else WITH_REFERENCE


def written_so_far(tag: bytes) -> BytesIO:
    """Return a buffer that begins with the tag, to which an encoding appends."""
    out = BytesIO()
    out.write(tag)
    return out


def wanted_of(values: FlatArray, residual: FlatArray | None, chunk: slice) -> FlatArray:
    """Return values plus residual of a chunk, finite: what the reader should receive."""
    if residual is None:
        return values[chunk]
    with np.errstate(over="ignore"):
        wanted: FlatArray = np.clip(values[chunk] + residual[chunk], -LARGEST, LARGEST)
        return wanted


def part_of(reference: FlatArray | None, chunk: slice) -> FlatArray | None:
    """Return the reference of a chunk; None if there is no reference."""
    return None if reference is None else reference[chunk]


def difference(wanted: FlatArray, reference: FlatArray | None) -> FlatArray:
    """Return the differences to the reference if there is one, else the values; finite, same shape."""
    if reference is None:
        return wanted
    with np.errstate(over="ignore"):
        apart: FlatArray = wanted - reference
        return np.clip(apart, -LARGEST, LARGEST, out=apart)


def with_reference(differences: FlatArray, reference: FlatArray | None) -> FlatArray:
    """Add the reference, if there is one, in place. Overflow becomes the largest float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        if reference is not None:
            differences += reference
        return np.clip(differences, -LARGEST, LARGEST, out=differences)


def whole(values: FlatArray, residual: FlatArray | None) -> Encoded:
    """Return the values unchanged after a form byte, for use without a reference, or if noise could exceed
    float32.
    """
    plain = wanted_of(values, residual, slice(None)).astype("<f4").tobytes()
    return Encoded(bytes([AS_THEY_ARE]) + plain)


def read_whole(data: bytes, count: int) -> FlatArray:
    """Return the values that `whole` wrote, shape (count,). Raises PacketCorrupt if their number differs."""
    check_length(data, 1 + 4 * count)
    return np.frombuffer(data, "<f4", offset=1).astype(np.float32)


def check_length(data: bytes, length: int) -> None:
    """Raise PacketCorrupt if the data do not have this length."""
    if len(data) != length:
        raise PacketCorrupt(f"encoded values have {len(data)} bytes; expected {length}")


def stream_of(content: NDArray[Any], compressor: zstandard.ZstdCompressor) -> list[bytes]:
    """Return a stream's length and its stored bytes."""
    plain = content.tobytes()
    packed = compressor.compress(plain)
    stored = packed if len(packed) < len(plain) else plain
    return [len(stored).to_bytes(4, "little"), stored]


def new_compressor() -> zstandard.ZstdCompressor:
    """Return a compressor for the streams of one payload; it reuses its memory between streams."""
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL)


class Chunked(Encoding):
    """Base class of encodings that can be read chunk by chunk from any source of bytes."""

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        return self.decode_from(BytesIO(data), len(data), count, known)

    def decode_from(self, source: Source, length: int, count: int, known: Known) -> FlatArray:
        reader = Reader(source, length)
        reference = reader.reference(known)
        values = reference if reference is not None and known.spare else np.empty(count, np.float32)
        for chunk in chunks(count):
            values[chunk] = self.read_chunk(reader, known, chunk, part_of(reference, chunk))
        reader.end()
        return values

    @abstractmethod
    def read_chunk(
        self, reader: "Reader", known: Known, chunk: slice, reference: FlatArray | None
    ) -> FlatArray:
        """Read the values of the next chunk.

        Args:
            reader: reader, positioned before the chunk.
            known: facts that both sides know about all entries.
            chunk: range of the chunk's entries.
            reference: reference of these entries; None if they were written without one.
        """


@dataclass
class Reader:
    """Reads encoded values from front to back.

    Attributes:
        source: source of the bytes.
        left: number of bytes that remain to be read.
    """

    source: Source
    left: int

    def __post_init__(self) -> None:
        self._unpacker = zstandard.ZstdDecompressor()

    def reference(self, known: Known) -> FlatArray | None:
        """Read the tag, and return the values' reference; None if they have none. Raises PacketCorrupt."""
        tag = self.take(1)
        if tag not in (WITHOUT_REFERENCE, WITH_REFERENCE):
            raise PacketCorrupt(f"encoded values begin with {tag!r}; expected 0 or 1")
        if tag == WITHOUT_REFERENCE:
            return None
        if known.reference is None:
            raise PacketCorrupt(
                "the values are differences to a reference model that this side does not have"
            )
        return known.reference

    def take(self, length: int) -> bytes:
        """Read the next bytes. Raises PacketCorrupt if there are too few."""
        if length > self.left:
            raise PacketCorrupt(
                f"encoded values are cut short: expected {length} more bytes, {self.left} remain"
            )
        self.left -= length
        return self.source.read(length)

    def plane(self, length: int) -> Bytes:
        """Read the next bytes as an array, shape (length,). Raises PacketCorrupt."""
        return np.frombuffer(self.take(length), np.uint8)

    def stream(self, length: int) -> Bytes:
        """Read and unpack the next stream, shape (length,). Raises PacketCorrupt if it has another length."""
        stored = int.from_bytes(self.take(4), "little")
        if stored == length:
            return self.plane(length)
        packed = self.take(stored)
        try:
            if zstandard.get_frame_parameters(packed).content_size != length:
                raise PacketCorrupt(f"a stream of encoded values does not have {length} bytes")
            return np.frombuffer(self._unpacker.decompress(packed), np.uint8)
        except zstandard.ZstdError as problem:
            raise PacketCorrupt(f"a stream of encoded values cannot be decompressed: {problem}") from None

    def end(self) -> None:
        """Check that all bytes were read. Raises PacketCorrupt if some remain."""
        if self.left:
            raise PacketCorrupt(f"{self.left} bytes after the end of the encoded values")
