"""What the encodings of differences share: a tag, chunks of values, and in these streams of bytes.

The first byte says whether the values were written as differences to a base (1) or as they are (0). Behind it
follow chunks of `CHUNK` values, the last one shorter; each is read by itself, so that neither side needs
more scratch space than one chunk takes. A stream is its stored length (4 bytes, little endian) and what is
stored: a zstd frame that says its content's size where that is shorter than the bytes themselves, else these.
Who reads knows how long a stream is unpacked, which is how the two are told apart.
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

CHUNK = 2**16  # values: scratch arrays of this size stay in a processor's cache
WITHOUT_BASE, WITH_BASE = b"\0", b"\1"
AS_THEY_ARE = 0  # the first byte where values follow as they are, in encodings without chunks
LARGEST = np.finfo(np.float32).max
_ZSTD_LEVEL = 1  # higher ones gain nothing on what is left: their matches are accidents

Bytes = NDArray[np.uint8]


def chunks(count: int) -> Iterator[slice]:
    """Where each chunk of so many values stands."""
    return (slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def tag_of(known: Known) -> bytes:
    """The first byte of what is written with this help."""
    return WITHOUT_BASE if known.base is None else WITH_BASE


def written_so_far(tag: bytes) -> BytesIO:
    """Where an encoding goes on behind its tag."""
    out = BytesIO()
    out.write(tag)
    return out


def wanted_of(values: FlatArray, residual: FlatArray | None, chunk: slice) -> FlatArray:
    """What is to arrive of a chunk, finite."""
    if residual is None:
        return values[chunk]
    with np.errstate(over="ignore"):
        wanted: FlatArray = np.clip(values[chunk] + residual[chunk], -LARGEST, LARGEST)
        return wanted


def part_of(base: FlatArray | None, chunk: slice) -> FlatArray | None:
    """A chunk of the base, if there is one."""
    return None if base is None else base[chunk]


def difference(wanted: FlatArray, base: FlatArray | None) -> FlatArray:
    """To the base, if there is one; finite, same shape."""
    if base is None:
        return wanted
    with np.errstate(over="ignore"):
        apart: FlatArray = wanted - base
        return np.clip(apart, -LARGEST, LARGEST, out=apart)


def with_base(differences: FlatArray, base: FlatArray | None) -> FlatArray:
    """The base added, if there is one, in place; what float32 does not hold becomes its largest number."""
    with np.errstate(over="ignore", invalid="ignore"):
        if base is not None:
            differences += base
        return np.clip(differences, -LARGEST, LARGEST, out=differences)


def whole(values: FlatArray, residual: FlatArray | None) -> Encoded:
    """The values behind the byte that says so: there is no base, or noise could lead beyond float32."""
    plain = wanted_of(values, residual, slice(None)).astype("<f4").tobytes()
    return Encoded(bytes([AS_THEY_ARE]) + plain)


def read_whole(data: bytes, count: int) -> FlatArray:
    """Shape (count,). Raises PacketCorrupt: these are not so many."""
    check_length(data, 1 + 4 * count)
    return np.frombuffer(data, "<f4", offset=1).astype(np.float32)


def check_length(data: bytes, length: int) -> None:
    """Raises PacketCorrupt: it has another."""
    if len(data) != length:
        raise PacketCorrupt(f"encoded values of {len(data)} bytes; {length} are due")


def stream_of(content: NDArray[Any], compressor: zstandard.ZstdCompressor) -> list[bytes]:
    """A stream's length and what is stored of it."""
    plain = content.tobytes()
    packed = compressor.compress(plain)
    stored = packed if len(packed) < len(plain) else plain
    return [len(stored).to_bytes(4, "little"), stored]


def new_compressor() -> zstandard.ZstdCompressor:
    """For the streams of one payload: it keeps its memory from one to the next."""
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL)


class Chunked(Encoding):
    """Encodings that read chunk by chunk, from whatever the bytes come from."""

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        return self.decode_from(BytesIO(data), len(data), count, known)

    def decode_from(self, source: Source, length: int, count: int, known: Known) -> FlatArray:
        reader = Reader(source, length)
        base = reader.base(known)
        values = base if base is not None and known.spare else np.empty(count, np.float32)
        for chunk in chunks(count):
            values[chunk] = self.read_chunk(reader, known, chunk, part_of(base, chunk))
        reader.end()
        return values

    @abstractmethod
    def read_chunk(self, reader: "Reader", known: Known, chunk: slice, base: FlatArray | None) -> FlatArray:
        """The values of the next chunk.

        Args:
            reader: stands before it.
            known: of all entries.
            chunk: which of them are in it.
            base: of these; None: they were written without one.
        """


@dataclass
class Reader:
    """Goes through what was written, from the front.

    Attributes:
        source: where it comes from.
        left: how many bytes are still to come.
    """

    source: Source
    left: int

    def __post_init__(self) -> None:
        self._unpacker = zstandard.ZstdDecompressor()

    def base(self, known: Known) -> FlatArray | None:
        """Read the tag: the base of the values; None: they were written without one. Raises PacketCorrupt."""
        tag = self.take(1)
        if tag not in (WITHOUT_BASE, WITH_BASE):
            raise PacketCorrupt(f"encoded values begin with {tag!r}; this side knows 0 and 1")
        if tag == WITHOUT_BASE:
            return None
        if known.base is None:
            raise PacketCorrupt("values are written as differences to a base that this side does not hold")
        return known.base

    def take(self, length: int) -> bytes:
        """The next bytes. Raises PacketCorrupt: there are not so many."""
        if length > self.left:
            raise PacketCorrupt(f"encoded values are cut short: {length} bytes are due, {self.left} are left")
        self.left -= length
        return self.source.read(length)

    def plane(self, length: int) -> Bytes:
        """The next bytes, shape (length,). Raises PacketCorrupt."""
        return np.frombuffer(self.take(length), np.uint8)

    def stream(self, length: int) -> Bytes:
        """The next stream, which unpacks to shape (length,). Raises PacketCorrupt: it does not."""
        stored = int.from_bytes(self.take(4), "little")
        if stored == length:
            return self.plane(length)
        packed = self.take(stored)
        try:
            if zstandard.get_frame_parameters(packed).content_size != length:
                raise PacketCorrupt(f"a stream of encoded values is not of {length} bytes")
            return np.frombuffer(self._unpacker.decompress(packed), np.uint8)
        except zstandard.ZstdError as problem:
            raise PacketCorrupt(f"a stream of encoded values does not unpack: {problem}") from None

    def end(self) -> None:
        """Raises PacketCorrupt: something follows."""
        if self.left:
            raise PacketCorrupt(f"{self.left} bytes behind the encoded values")
