"""The body of a payload, unpacked from the front as it is asked for, never all of it at once."""

from io import BytesIO
from typing import Protocol

import zstandard

from fleetune.protocols.errors import PacketCorrupt, PacketTruncated

STEP = 2**16  # bytes that are unpacked at a time, and passed on at most
_MOST_WINDOW = 2**23  # that a frame may need to look back; our own need 2^21 at most
_READ = 2**17


class Source(Protocol):
    """What bytes are read from, in their order."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, fewer at the end of all."""
        ...


class Body:
    """What a zstd frame holds, or what lies there as it is, from its front.

    Attributes:
        num_bytes: all of it, as the frame says itself.
        at: how much of it is passed.
    """

    def __init__(
        self,
        packed: memoryview,
        num_bytes: int,
        *,
        plain: bool = False,
        dictionary: zstandard.ZstdCompressionDict | None = None,
    ) -> None:
        """Args:
            packed: the frame.
            num_bytes: length of what it holds.
            plain: `packed` is the body itself.
            dictionary: that the frame was compressed with; None: without.

        Raises:
            PacketCorrupt: it is no frame, or not of so many bytes.
        """
        self.num_bytes, self.at = num_bytes, 0
        self._made = 0  # bytes unpacked so far, of which
        self._ahead, self._passed = b"", 0  # these were looked at, and so many of them passed
        if plain:
            self._unpacking: Source = BytesIO(packed)
            return
        try:
            if zstandard.get_frame_parameters(packed).content_size != num_bytes:
                raise PacketCorrupt("the compressed body is not as long as the header says")
        except zstandard.ZstdError as problem:
            raise _not_unpacked(problem) from None
        unpacker = zstandard.ZstdDecompressor(dict_data=dictionary, max_window_size=_MOST_WINDOW)
        self._unpacking = unpacker.stream_reader(packed, read_size=_READ)

    def peek(self, size: int) -> bytes:
        """The next bytes, fewer at the end of the body. Raises PacketCorrupt, PacketTruncated."""
        if len(self._ahead) - self._passed < size:
            self._ahead = self._ahead[self._passed :] + self._unpacked(max(size, STEP))
            self._passed = 0
        return self._ahead[self._passed : self._passed + size]

    def read(self, size: int, /) -> bytes:
        """The next bytes, passed. Raises PacketCorrupt, PacketTruncated: there are not so many."""
        if size > self.num_bytes - self.at:
            raise PacketCorrupt("packet ends in the middle of a value")
        taken = self._ahead[self._passed : self._passed + size]
        self._passed += len(taken)
        if len(taken) < size:
            taken += self._unpacked(size - len(taken))
        self.at += size
        return taken

    def skip(self, size: int) -> None:
        """Pass so many bytes. Raises PacketCorrupt, PacketTruncated: there are not so many."""
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
