"""Range coder in whole numbers: writes symbols in as many bits as their probabilities require.

The state is a 64-bit `low` and a `width` of at most 2^64. The coder emits 32 bits at a time, with carry.
Writer and reader go through the same intervals, so both must derive them from earlier symbols. Source:
Martin, Range encoding (1979). A carry is added to the bytes already written. Bytes: docs/wire.md, `sparse`,
*Range code*.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.errors import PacketCorrupt, PacketTruncated
from fleetune.protocols.update.entropy.octaves import Ints

_WORD = 32
_TOP = 1 << 64
_LOW_WORD = (1 << _WORD) - 1
_SLACK_BYTES = 8  # bytes of 0 that the reader assumes after the end; they are not written


def intervals_of(number: int, num_lengths: int) -> list[tuple[int, int, int]]:
    """Return start, size and total of the symbols of a whole number; see `RangeEncoder.write_number`."""
    length = number.bit_length()
    found = [(length, 1, num_lengths)]
    if length > 1:
        found.append((number - (1 << length - 1), 1, 1 << length - 1))
    return found


class RangeEncoder:
    """Writes symbols, each given as its interval of a total."""

    def __init__(self) -> None:
        self._low = 0
        self._width = _TOP
        self._words: list[int] = []

    def write(self, start: int, size: int, total: int) -> None:
        """Write the symbol whose interval has `size` numbers of 0..total-1, from `start` on; total < 2^32."""
        step = self._width // total
        self._low += step * start
        self._width = step * size
        while self._width <= _LOW_WORD:
            self._shift()

    def write_number(self, number: int, num_lengths: int) -> None:
        """Write a whole number: first its bit length, below `num_lengths` <= 32, then its bits after the
        first.
        """
        for interval in intervals_of(number, num_lengths):
            self.write(*interval)

    def write_counted(self, symbol: int, counts: list[int]) -> None:
        """Write one of the symbols 0..len(counts)-1, each with a probability proportional to its count."""
        self.write(sum(counts[:symbol]), counts[symbol], sum(counts))

    def write_all(self, starts: list[int], sizes: list[int], totals: list[int]) -> None:
        """Write several symbols, each as `write` does."""
        low, width, words = self._low, self._width, self._words
        for start, size, total in zip(starts, sizes, totals, strict=True):
            step = width // total
            low += step * start
            width = step * size
            while width <= _LOW_WORD:
                if low >= _TOP:
                    low -= _TOP
                    self._carry()
                words.append(low >> _WORD)
                low = (low & _LOW_WORD) << _WORD
                width <<= _WORD
        self._low, self._width = low, width

    def finish(self) -> bytes:
        """End the code, and return it in the fewest bytes that identify it."""
        # the number inside the interval with the most zero bits at its end
        zeros = self._width.bit_length() - 1
        self._low = -(-self._low >> zeros) << zeros
        self._shift()
        self._shift()
        data = struct.pack(f">{len(self._words)}I", *self._words)
        return data[:-_SLACK_BYTES] + data[-_SLACK_BYTES:].rstrip(b"\0")

    def _shift(self) -> None:
        if self._low >= _TOP:
            self._low -= _TOP
            self._carry()
        self._words.append(self._low >> _WORD)
        self._low = (self._low & _LOW_WORD) << _WORD
        self._width <<= _WORD

    def _carry(self) -> None:
        place = len(self._words) - 1
        while self._words[place] == _LOW_WORD:
            self._words[place] = 0
            place -= 1
        self._words[place] += 1


class RangeDecoder:
    """Reads what `RangeEncoder` wrote. Bytes after the end count as zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 8
        # the code read so far, minus the writer's `low`
        self._code = int.from_bytes(data[:8].ljust(8, b"\0"), "big")
        self._width = _TOP
        self._step = 0

    def peek(self, total: int) -> int:
        """Return the next number of 0..total-1. The caller then takes the symbol whose interval contains it.

        Raises:
            PacketCorrupt: `RangeEncoder` cannot have written these bytes.
        """
        self._step = self._width // total
        value = self._code // self._step
        if value >= total:
            raise PacketCorrupt("damaged entropy code: a number lies outside its interval")
        return value

    def take(self, start: int, size: int) -> None:
        """Advance past the symbol that `peek` found. Raises PacketTruncated if the bytes end before it."""
        self._code -= self._step * start
        self._width = self._step * size
        if self._width <= _LOW_WORD:
            self._refill()

    def _refill(self) -> None:
        while self._width <= _LOW_WORD:
            if self._offset >= len(self._data) + _SLACK_BYTES:
                raise PacketTruncated("the entropy-coded values are cut short")
            word = self._data[self._offset : self._offset + 4].ljust(4, b"\0")
            self._code = (self._code << _WORD) | int.from_bytes(word, "big")
            self._offset += 4
            self._width <<= _WORD

    def read_symbol(self, starts: list[int], last: int) -> int:
        """Read one of the symbols 0..last, with a total of 2^16.

        The interval of a symbol ends where the next one starts. The interval of `last` has no upper bound.

        Raises:
            PacketTruncated, PacketCorrupt: the data end too early or are damaged.
        """
        symbol = min(last, bisect_right(starts, self.peek(1 << 16)) - 1)
        end = 1 << 16 if symbol == last else starts[symbol + 1]
        self.take(starts[symbol], end - starts[symbol])
        return symbol

    def read_counted(self, counts: list[int]) -> int:
        """Read what `write_counted` wrote. Raises PacketTruncated, PacketCorrupt."""
        value, symbol, start = self.peek(sum(counts)), 0, 0
        while value >= start + counts[symbol]:
            start += counts[symbol]
            symbol += 1
        self.take(start, counts[symbol])
        return symbol

    def read_many(self, starts: list[int], count: int) -> bytes:
        """Read `count` symbols with common starts, each below 256. Raises PacketTruncated, PacketCorrupt."""
        total, symbols = starts[-1], bytearray(count)
        code, width = self._code, self._width
        for place in range(count):
            step = width // total
            value = code // step
            if value >= total:
                raise PacketCorrupt("damaged entropy code: a number lies outside its interval")
            symbols[place] = symbol = bisect_right(starts, value) - 1
            start = starts[symbol]
            code -= step * start
            width = step * (starts[symbol + 1] - start)
            if width <= _LOW_WORD:
                self._code, self._width = code, width
                self._refill()
                code, width = self._code, self._width
        self._code, self._width = code, width
        return bytes(symbols)

    def read_bits(self, num_bits: int) -> int:
        """Read a number below 2^num_bits. Raises PacketTruncated, PacketCorrupt."""
        return self.read_even(1 << num_bits) if num_bits else 0

    def read_even(self, total: int) -> int:
        """Read one of 0..total-1, all equally likely. Raises PacketTruncated, PacketCorrupt."""
        value = self.peek(total)
        self.take(value, 1)
        return value

    def read_number(self, num_lengths: int) -> int:
        """Read what `write_number` wrote. Raises PacketTruncated, PacketCorrupt."""
        length = self.read_even(num_lengths)
        return 0 if not length else (1 << length - 1) + self.read_bits(length - 1)

    def finish(self) -> None:
        """Check that all bytes were read. Raises PacketCorrupt if some remain."""
        if self._offset < len(self._data):
            raise PacketCorrupt(
                f"{len(self._data) - self._offset} bytes after the end of the entropy-coded values"
            )


Interval = tuple[int, int, int]  # (start, size, total)


@dataclass(frozen=True)
class Symbols:
    """Intervals for a range coder, see `RangeEncoder.write`.

    Attributes:
        order: sort key of each symbol, shape (n,); symbols with equal keys keep their order.
        start, size, total: interval of each symbol, same shape.
    """

    order: Ints
    start: Ints
    size: Ints
    total: Ints


def symbols_in_order(found: Iterable[tuple[int, int, int, int]]) -> Symbols:
    """Return symbols from tuples (order, start, size, total)."""
    return Symbols(*np.array(list(found), np.int64).reshape(-1, 4).T)


def write_symbols(out: RangeEncoder, parts: list[Symbols]) -> None:
    """Write the symbols of all parts, sorted by their order."""
    by_order = np.argsort(np.concatenate([part.order for part in parts]), kind="stable")
    start, size, total = (
        np.concatenate([getattr(part, name) for part in parts])[by_order].tolist()
        for name in ("start", "size", "total")
    )
    out.write_all(start, size, total)
