"""A few entries and their signs: what changed most, entropy-coded; the rest waits for a later round.

Of the difference to the base the largest entries are sent, each tensor's with one magnitude (sparse ternary
compression, Sattler et al. 2019, arXiv:1903.02891, with error feedback). Where we differ: a magnitude for
each tensor, rounded to an eighth of an octave; places coded by rows and columns (sparse_places.py)
instead of Golomb codes, and signs by those of their row. Bytes: docs/wire.md, `sparse`.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, PacketNotFinite, SettingError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.encoding import Encoded, Encoding, EncodingCost, Known
from fleetune.protocols.update.encodings.range_coder import RangeDecoder, RangeEncoder
from fleetune.protocols.update.encodings.sparse_places import (
    BLOCK,
    Activity,
    Ints,
    places_of,
    read_hits,
    write_hits,
)

MAGNITUDES = 8 * 277  # eighths of an octave from 2^-149, all that float32 has
_AS_THEY_ARE, _DIFFERENCES, _FORMS = 0, 1, 8  # the others are for later versions
_STRIDE_LENGTHS = 13  # a step from one magnitude to another has at most 12 bits
_ROW_UNKNOWN = 64  # entries a row where no row is known
_MANTISSAS = (32768, 35734, 38968, 42495, 46341, 50535, 55109, 60097)  # 2^15 * 2^(k / 8)
_LOG_STEPS = (34219, 37316, 40693, 44376, 48393, 52773, 57549, 62757)  # 2^15 * 2^((k + 1/2) / 8)
_MOST_VOTES = 3
_SUBNORMAL = 149  # 2^-149 is the smallest float32
_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True)
class Sparse(Encoding):
    """A share of the entries, each with a sign and its tensor's mean magnitude.

    Attributes:
        density: the share that is sent, above 0 and at most 1.
    """

    density: float = 0.02

    name = "sparse"
    cost = EncodingCost(bytes_per_value=0.017, passes=12)
    lossless = False

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise SettingError(f"sparse: density {self.density} is not a share; take one above 0, at most 1")

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        base = np.zeros_like(values) if known.base is None else known.base
        with np.errstate(over="ignore"):
            wanted = values if residual is None else np.clip(values + residual, -_LARGEST, _LARGEST)
            change = np.clip(wanted - base, -_LARGEST, _LARGEST)
        chosen = _largest(change, self.density)
        tensors = _tensors(known, values.size)
        arrived, magnitudes = base.copy(), []
        for tensor in tensors:
            part = slice(tensor.start, tensor.stop)
            magnitudes.append(_mean_magnitude(change[part][chosen[part]]))
            step = np.where(
                chosen[part], np.copysign(_magnitude(magnitudes[-1]), change[part]), np.float32(0)
            )
            with np.errstate(over="ignore"):
                sent = base[part] + step
            chosen[part] &= np.isfinite(sent)
            arrived[part] = np.where(chosen[part], sent, base[part])
        with np.errstate(over="ignore"):
            left_out = np.clip(wanted - arrived, -_LARGEST, _LARGEST)
        writer = _Writer(RangeEncoder())
        writer.out.write(_AS_THEY_ARE if known.base is None else _DIFFERENCES, 1, _FORMS)
        for tensor, magnitude in zip(tensors, magnitudes, strict=True):
            writer.write(tensor, chosen, change, magnitude)
        return Encoded(writer.out.finish(), left_out)

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        values = np.zeros(count, np.float32) if known.base is None else known.base.copy()
        reader = _Reader(RangeDecoder(data))
        if reader.form() != (_AS_THEY_ARE if known.base is None else _DIFFERENCES):
            raise PacketCorrupt(
                "written with a base that this side lacks, or without one, or in a later form"
            )
        for tensor in _tensors(known, count):
            for hits, steps in reader.read(tensor):
                with np.errstate(over="ignore"):
                    values[hits] += steps
                if not np.isfinite(values[hits]).all():
                    raise PacketNotFinite("a difference leads beyond the largest float32")
        reader.data.finish()
        return values


@dataclass
class _SignCounts:
    """How often a sign was that of most entries before it in its row, by how many more these were."""

    counts: list[list[int]] = field(default_factory=lambda: [[1, 1] for _ in range(_MOST_VOTES + 1)])
    row: int = -1
    votes: int = 0  # positive less negative ones of the row

    def at(self, row: int) -> tuple[list[int], int]:
        """The counts that hold for the next entry, which is in `row`; and the sign that counts as 0."""
        if row != self.row:
            self.row, self.votes = row, 0
        return self.counts[min(abs(self.votes), _MOST_VOTES)], int(self.votes < 0)

    def add(self, counts: list[int], symbol: int, sign: int) -> None:
        counts[symbol] += 1
        self.votes += 1 - 2 * sign


@dataclass(frozen=True)
class _Tensor:
    """The entries of a patch that are of one tensor.

    Attributes:
        start, stop: which entries of the patch these are.
        row_size: how many entries a row has; 0: rows are not known, or are none.
        places: of every entry of the patch in its tensor; None: the tensor is whole.
    """

    start: int
    stop: int
    row_size: int
    places: NDArray[np.int32] | None

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def num_columns(self) -> int:
        return max(1, self.row_size)

    def blocks(self) -> Iterator[tuple[slice, Ints, Ints]]:
        """Parts of the patch, with the row in its block and the column in its tensor of each entry."""
        for start in range(self.start, self.stop, BLOCK):
            block = slice(start, min(start + BLOCK, self.stop))
            if self.places is None:
                places = np.arange(block.start - self.start, block.stop - self.start)
            else:
                places = self.places[block].astype(np.int64)
            rows = places // (self.row_size or _ROW_UNKNOWN)
            columns = places - rows * self.row_size if self.row_size else np.zeros_like(places)
            yield block, rows - rows[0], columns


@dataclass
class _Writer:
    """Writes tensor after tensor."""

    out: RangeEncoder
    signs: _SignCounts = field(default_factory=_SignCounts)
    magnitude: int | None = None  # of the tensor before

    def write(self, tensor: _Tensor, chosen: NDArray[np.bool_], change: FlatArray, magnitude: int) -> None:
        left = int(np.count_nonzero(chosen[tensor.start : tensor.stop]))
        self._write_number(left, tensor.size.bit_length() + 1)
        if not left:
            return
        if self.magnitude is None:
            self.out.write(magnitude, 1, MAGNITUDES)
        else:
            ahead = magnitude - self.magnitude
            self._write_number(2 * ahead if ahead >= 0 else -2 * ahead - 1, _STRIDE_LENGTHS)
        self.magnitude = magnitude
        busy_columns = Activity(tensor.num_columns)
        for block, rows, columns in tensor.blocks():
            num_hits = int(np.count_nonzero(chosen[block]))
            if block.stop < tensor.stop:
                self._write_number(num_hits, rows.size.bit_length() + 1)
            hits = places_of(rows, columns, busy_columns, num_hits, write_hits(self.out, chosen[block]))
            self.signs.row = -1
            for row, sign in zip(rows[hits].tolist(), (change[block][hits] < 0).tolist(), strict=True):
                self._write_sign(row, sign)

    def _write_sign(self, row: int, sign: int) -> None:
        counts, likely = self.signs.at(row)
        symbol = sign ^ likely
        self.out.write(counts[0] if symbol else 0, counts[symbol], counts[0] + counts[1])
        self.signs.add(counts, symbol, sign)

    def _write_number(self, number: int, num_lengths: int) -> None:
        length = number.bit_length()
        self.out.write(length, 1, num_lengths)
        if length > 1:
            self.out.write_bits(number - (1 << length - 1), length - 1)


@dataclass
class _Reader:
    """Reads what `_Writer` wrote, tensor after tensor."""

    data: RangeDecoder
    signs: _SignCounts = field(default_factory=_SignCounts)
    magnitude: int | None = None

    def form(self) -> int:
        """What the values are, the first that is written. Raises PacketCorrupt, PacketTruncated."""
        found = self.data.peek(_FORMS)
        self.data.take(found, 1)
        return found

    def read(self, tensor: _Tensor) -> Iterator[tuple[Ints, FlatArray]]:
        """Entries of the patch that change, and by how much.

        Raises:
            PacketCorrupt, PacketTruncated.
        """
        left = self._read_number(tensor.size.bit_length() + 1)
        if not left:
            return
        size = _magnitude(self._read_magnitude())
        busy_columns = Activity(tensor.num_columns)
        for block, rows, columns in tensor.blocks():
            num_hits = left if block.stop == tensor.stop else self._read_number(rows.size.bit_length() + 1)
            if num_hits > min(left, rows.size):
                raise PacketCorrupt(f"{num_hits} of {rows.size} entries, where {left} are left")
            hits = places_of(rows, columns, busy_columns, num_hits, read_hits(self.data))
            if hits.size < num_hits:
                raise PacketCorrupt(f"{hits.size} entries where {num_hits} were announced")
            left -= num_hits
            self.signs.row = -1
            negative = np.array([self._read_sign(row) for row in rows[hits].tolist()], np.bool_)
            yield block.start + hits, np.where(negative, -size, size)

    def _read_magnitude(self) -> int:
        if self.magnitude is None:
            self.magnitude = self.data.peek(MAGNITUDES)
            self.data.take(self.magnitude, 1)
        else:
            ahead = self._read_number(_STRIDE_LENGTHS)
            self.magnitude += -(ahead + 1) // 2 if ahead % 2 else ahead // 2
        if not 0 <= self.magnitude < MAGNITUDES:
            raise PacketCorrupt("a magnitude beyond float32")
        return self.magnitude

    def _read_sign(self, row: int) -> int:
        counts, likely = self.signs.at(row)
        symbol = int(self.data.peek(counts[0] + counts[1]) >= counts[0])
        self.data.take(counts[0] if symbol else 0, counts[symbol])
        sign = symbol ^ likely
        self.signs.add(counts, symbol, sign)
        return sign

    def _read_number(self, num_lengths: int) -> int:
        length = self.data.peek(num_lengths)
        self.data.take(length, 1)
        return 0 if not length else (1 << length - 1) + self.data.read_bits(length - 1)


def _largest(change: FlatArray, density: float) -> NDArray[np.bool_]:
    """The share of the entries that are largest, of equal ones the first; never one that is 0."""
    chosen = np.zeros(change.size, np.bool_)
    size = np.abs(change)
    wanted = min(int(np.count_nonzero(size)), math.ceil(density * change.size))
    if wanted:
        bound = np.partition(size, change.size - wanted)[change.size - wanted]
        chosen = size > bound
        at_bound = np.flatnonzero(size == bound)
        chosen[at_bound[: wanted - int(np.count_nonzero(chosen))]] = True
    return chosen


def _tensors(known: Known, count: int) -> list[_Tensor]:
    """The tensors of a patch of so many entries."""
    tensors, start = [], 0
    while start < count:
        number = known.tensors[start] if known.tensors.size else 0
        stop = int(np.searchsorted(known.tensors, number, "right")) if known.tensors.size else count
        row_size = known.row_sizes[number] if known.row_sizes else 0
        known_rows = row_size if 1 < row_size <= BLOCK else 0
        tensors.append(_Tensor(start, stop, known_rows, known.places))
        start = stop
    return tensors


def _mean_magnitude(change: FlatArray) -> int:
    """The mean of the absolute values, to the nearest eighth of an octave; summed as whole numbers."""
    if not change.size:
        return 0
    unit = int(np.frexp(np.abs(change).max())[1]) - 38  # a sum of 2^24 entries fits into 62 bits
    mean = int(np.ldexp(np.abs(change).astype(np.float64), -unit).astype(np.int64).sum()) // change.size
    exponent = mean.bit_length() - 1
    leading = (mean << 16 >> exponent) >> 1
    eighths = 8 * (exponent + unit + _SUBNORMAL) + bisect_right(_LOG_STEPS, leading)
    return max(0, min(eighths, MAGNITUDES - 1))


def _magnitude(eighths: int) -> np.float32:
    return np.float32(math.ldexp(_MANTISSAS[eighths % 8], eighths // 8 - _SUBNORMAL - 15))
