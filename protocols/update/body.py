"""The body of a payload, decompressed step by step as it is read, never as a whole."""

from io import BytesIO
from typing import Protocol

import zstandard

from fleetune.protocols.errors import PacketCorrupt, PacketTruncated

STEP = 2**16  # bytes that are decompressed or passed on at a time
_MOST_WINDOW = 2**23  # largest window of a zstd frame that is accepted; our own frames need at most 2^21
_READ = 2**17


class Source(Protocol):
    """A stream of bytes to read from."""

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, or fewer at the end of the stream."""
        ...


class Body:
    """The uncompressed body of a payload, read from front to back.

    Attributes:
        num_bytes: length of the whole uncompressed body.
        at: number of bytes read so far.
    """

    def __init__(
        self,
        packed: memoryview | Source,
        num_bytes: int,
        *,
        plain: bool = False,
        dictionary: zstandard.ZstdCompressionDict | None = None,
    ) -> None:
        """Open a body.

        Args:
            packed: the zstd frame; if `plain` is True, it may be a source.
            num_bytes: length of its content.
            plain: True if `packed` is the content itself, without a frame.
            dictionary: dictionary with which the frame was compressed; None for none.

        Raises:
            PacketCorrupt: `packed` is not a zstd frame, or its content has another length.
        """
        self.num_bytes, self.at = num_bytes, 0
        self._made = 0  # number of bytes decompressed so far
        # bytes that `peek` has decompressed, and how many of them were read
        self._ahead, self._passed = b"", 0
        if not isinstance(packed, memoryview):
            assert plain, "a source supplies the content itself"
            self._unpacking: Source = packed
            return
        if plain:
            self._unpacking = BytesIO(packed)
            return
        try:
            if zstandard.get_frame_parameters(packed).content_size != num_bytes:
                raise PacketCorrupt("the compressed body has another length than its header states")
        except zstandard.ZstdError as problem:
            raise _not_unpacked(problem) from None
        unpacker = zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=_MOST_WINDOW)
        self._unpacking = unpacker.stream_reader(packed, read_size=_READ)

    def peek(self, size: int) -> bytes:
        """Return the next bytes without reading them; fewer at the end. Raises PacketCorrupt,
        PacketTruncated.
        """
        if len(self._ahead) - self._passed < size:
            self._ahead = self._ahead[self._passed :] + self._unpacked(max(size, STEP))
            self._passed = 0
        return self._ahead[self._passed : self._passed + size]

    def read(self, size: int, /) -> bytes:
        """Read the next `size` bytes. Raises PacketCorrupt or PacketTruncated if the body ends before."""
        if size > self.num_bytes - self.at:
            raise PacketCorrupt("the payload ends in the middle of a value")
        taken = self._ahead[self._passed : self._passed + size]
        self._passed += len(taken)
        if len(taken) < size:
            taken += self._unpacked(size - len(taken))
        self.at += size
        return taken

    def skip(self, size: int) -> None:
        """Skip the next `size` bytes. Raises PacketCorrupt or PacketTruncated if the body ends before."""
        while size > 0:
            size -= len(self.read(min(size, STEP)))

    def _unpacked(self, size: int) -> bytes:
        try:
            data = self._unpacking.read(size)
        except zstandard.ZstdError as problem:
            raise _not_unpacked(problem) from None
        self._made += len(data)
        if len(data) < size and self._made < self.num_bytes:
            raise PacketTruncated("the compressed body is cut short")
        return data


def _not_unpacked(problem: Exception) -> PacketCorrupt:
    return PacketCorrupt(f"body does not unpack: {problem}")
