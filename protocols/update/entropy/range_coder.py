"""A range coder in whole numbers: symbols to bits at the length that their probabilities allow.

State is a 64-bit `low` and a `width` of at most 2^64; 32 bits leave at a time, with carry. Whoever writes and
whoever reads walk through the same intervals, so both must derive them from what is read before. Source:
Martin, Range encoding (1979), with the carry resolved in what was written.
"""

import struct
from bisect import bisect_right

from fleetune.protocols.errors import PacketCorrupt, PacketTruncated

_WORD = 32
_TOP = 1 << 64
_LOW_WORD = (1 << _WORD) - 1
_SLACK_BYTES = 8  # of zeros behind the end, which are not written


def intervals_of(number: int, num_lengths: int) -> list[tuple[int, int, int]]:
    """Start, size and total of the symbols of a whole number, see `RangeEncoder.write_number`."""
    length = number.bit_length()
    found = [(length, 1, num_lengths)]
    if length > 1:
        found.append((number - (1 << length - 1), 1, 1 << length - 1))
    return found


class RangeEncoder:
    """Writes intervals of a total."""

    def __init__(self) -> None:
        self._low = 0
        self._width = _TOP
        self._words: list[int] = []

    def write(self, start: int, size: int, total: int) -> None:
        """The symbol that owns `size` numbers from `start` of 0..total-1; total < 2^32."""
        step = self._width // total
        self._low += step * start
        self._width = step * size
        while self._width <= _LOW_WORD:
            self._shift()

    def write_bits(self, value: int, num_bits: int) -> None:
        """An evenly distributed number below 2^num_bits, num_bits < 32."""
        if num_bits:
            self.write(value, 1, 1 << num_bits)

    def write_number(self, number: int, num_lengths: int) -> None:
        """A whole number: how many bits it has, below `num_lengths` <= 32, and these but the first."""
        for interval in intervals_of(number, num_lengths):
            self.write(*interval)

    def write_counted(self, symbol: int, counts: list[int]) -> None:
        """One of 0..len(counts)-1, each as likely as its count."""
        self.write(sum(counts[:symbol]), counts[symbol], sum(counts))

    def write_all(self, starts: list[int], sizes: list[int], totals: list[int]) -> None:
        """Symbol after symbol, each as `write` does it."""
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
        """What was written, in as few bytes as tell it from everything else."""
        zeros = self._width.bit_length() - 1  # at the end of the roundest number inside the interval
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
    """Reads what `RangeEncoder` wrote; bytes behind the end are zeros."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._offset = 8
        self._code = int.from_bytes(data[:8].ljust(8, b"\0"), "big")  # less the writer's `low`
        self._width = _TOP
        self._step = 0

    def peek(self, total: int) -> int:
        """Which number of 0..total-1 comes next; the symbol that owns it is to be taken.

        Raises:
            PacketCorrupt: none that a writer wrote.
        """
        self._step = self._width // total
        value = self._code // self._step
        if value >= total:
            raise PacketCorrupt("entropy-coded values leave their interval")
        return value

    def take(self, start: int, size: int) -> None:
        """Pass the symbol at which `peek` looked. Raises PacketTruncated: the bytes end before it."""
        self._code -= self._step * start
        self._width = self._step * size
        if self._width <= _LOW_WORD:
            self._refill()

    def _refill(self) -> None:
        while self._width <= _LOW_WORD:
            if self._offset >= len(self._data) + _SLACK_BYTES:
                raise PacketTruncated("entropy-coded values end too early")
            word = self._data[self._offset : self._offset + 4].ljust(4, b"\0")
            self._code = (self._code << _WORD) | int.from_bytes(word, "big")
            self._offset += 4
            self._width <<= _WORD

    def read_symbol(self, starts: list[int], last: int) -> int:
        """Which of 0..last comes, of a total of 2^16: each owns from its start on, `last` all that is left.

        Raises:
            PacketTruncated, PacketCorrupt.
        """
        symbol = min(last, bisect_right(starts, self.peek(1 << 16)) - 1)
        end = 1 << 16 if symbol == last else starts[symbol + 1]
        self.take(starts[symbol], end - starts[symbol])
        return symbol

    def read_counted(self, counts: list[int]) -> int:
        """What `write_counted` wrote. Raises PacketTruncated, PacketCorrupt."""
        value, symbol, start = self.peek(sum(counts)), 0, 0
        while value >= start + counts[symbol]:
            start += counts[symbol]
            symbol += 1
        self.take(start, counts[symbol])
        return symbol

    def read_many(self, starts: list[int], count: int) -> bytes:
        """So many symbols that `write_many` wrote. Raises PacketTruncated, PacketCorrupt."""
        total, symbols = starts[-1], bytearray(count)
        code, width = self._code, self._width
        for place in range(count):
            step = width // total
            value = code // step
            if value >= total:
                raise PacketCorrupt("entropy-coded values leave their interval")
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
        """A number below 2^num_bits. Raises PacketTruncated, PacketCorrupt."""
        return self.read_even(1 << num_bits) if num_bits else 0

    def read_even(self, total: int) -> int:
        """A number of 0..total-1, all equally likely. Raises PacketTruncated, PacketCorrupt."""
        value = self.peek(total)
        self.take(value, 1)
        return value

    def read_number(self, num_lengths: int) -> int:
        """What `write_number` wrote. Raises PacketTruncated, PacketCorrupt."""
        length = self.read_even(num_lengths)
        return 0 if not length else (1 << length - 1) + self.read_bits(length - 1)

    def finish(self) -> None:
        """Raises PacketCorrupt: there are bytes that nobody read."""
        if self._offset < len(self._data):
            raise PacketCorrupt(f"{len(self._data) - self._offset} bytes behind the entropy-coded values")
