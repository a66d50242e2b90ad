"""Codes a mask as one range code; booleans are equally likely, or predicted from values both sides hold.

A mask with one boolean for each parameter of the model is coded tensor by tensor, in blocks. Any other mask
is treated as one tensor with unknown rows. Bytes: docs/wire.md, *Masks*.

The booleans of a block are sorted by the magnitude of the reference, which both sides hold. Most masks mark
the magnitudes above or below a threshold. So in this order they are long runs with a blurred edge. The
booleans
are visited from coarse to fine: every 2^k-th boolean, then those halfway between, and so on. So each boolean
has known booleans on both sides, and the edge is found as in a binary search.

Nearby booleans give a first probability. The log odds are then shifted for the boolean's row (neuron), its
column (input) and its kind of place: by how many more True booleans these had so far than predicted. All sums
are whole numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import MaskArray, ModelSpec
from fleetune.protocols.update.entropy.booleans import (
    CHANCES,
    MOST,
    TOTAL,
    read_booleans,
    symbols_of,
    write_booleans,
)
from fleetune.protocols.update.entropy.octaves import Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder, write_symbols
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.reference_model import ReferenceModel

FIRST = 16  # a block's first booleans, at most this many, are predicted from earlier blocks only
_NEAR = ((32, 16), (4, 8), (1, 4))  # (known booleans on each side, weight of the estimate from a wider range)
_FAR = _NEAR[0][0]
# weight of the prediction, in 1/16 booleans, for rows and columns, and for kinds
_BELIEVED_AXIS, _BELIEVED_KIND = 16, 32
_NEAR_KINDS, _SHIFT_KINDS, _NEIGHBOUR_KINDS = 28, 7, 3
_KINDS = _NEAR_KINDS * _SHIFT_KINDS * _NEIGHBOUR_KINDS
_PLACES_OF_ODDS = quarter_octaves(np.arange(1, TOTAL + 1))
_LEVELS = np.zeros(TOTAL, np.int64)  # level of a probability out of TOTAL
_LEVELS[1:] = np.clip(_PLACES_OF_ODDS[:-1] - _PLACES_OF_ODDS[:-1][::-1], -MOST, MOST)
_LEVELS[0] = -MOST
# Sums of levels and shifts stay within this bound: a shift is at most 168 for the largest mask that is coded.
_BOUND = 1 << 10
_SUMS = np.arange(-_BOUND, _BOUND + 1)
_HELD = np.minimum(np.maximum(_SUMS, -MOST), MOST)
_CHANCES = CHANCES[_HELD + MOST].astype(np.float64)  # probabilities of sums, clipped to -MOST to MOST
_KIND_OF_NEAR = np.clip((_SUMS >> 1) + _NEAR_KINDS // 2, 0, _NEAR_KINDS - 1) * _SHIFT_KINDS * _NEIGHBOUR_KINDS
_KIND_OF_SHIFT = np.clip((_SUMS + 2 >> 2) + _SHIFT_KINDS // 2, 0, _SHIFT_KINDS - 1) * _NEIGHBOUR_KINDS
_HIT_BITS = 30  # the predicted probabilities of a batch sum up to less than 2^30

# (levels of the booleans of a batch, their range in the block's order) -> the booleans
CodeBatch = Callable[[Ints, slice], MaskArray]


class _Counts:
    """Counts of booleans, of True booleans, and of predicted True booleans, by kind of place, column and row.

    All three lie one after the other in the same arrays, so that a batch is counted in one call.

    Attributes:
        shifts: observed odds relative to the predicted odds, in quarter octaves.
    """

    def __init__(self) -> None:
        self._seen, self._hits, self._expected = np.zeros((3, _KINDS), np.int64)
        self._believed = np.full(_KINDS, _BELIEVED_KIND)
        self.shifts = np.zeros(_KINDS, np.int64)

    def begin_anew(self, first: int, size: int) -> None:
        """Reset the counts from place `first` on, and resize to `size` places."""
        self._seen = _resized(self._seen, first, size)
        self._hits = _resized(self._hits, first, size)
        self._expected = _resized(self._expected, first, size)
        self._believed = _resized(self._believed, first, size, _BELIEVED_AXIS)
        self.shifts = _resized(self.shifts, first, size)

    def add(self, members: Sequence[Ints], levels: Sequence[Ints], booleans: MaskArray) -> None:
        """Count booleans in k places each, with the levels predicted there; shapes (n,)."""
        places, size = np.concatenate(members), self._seen.size
        weights = np.empty((len(levels), booleans.size))
        for weight, level in zip(weights, levels, strict=True):
            weight[:] = _CHANCES[level + _BOUND]
        weights += booleans * float(1 << _HIT_BITS)
        both = np.bincount(places, weights.ravel(), size).astype(np.int64)  # exact: below 2^53
        self._seen += np.bincount(places, minlength=size)
        self._hits += both >> _HIT_BITS
        self._expected += both & (1 << _HIT_BITS) - 1
        changed = places if places.size < size else slice(None)
        self.shifts[changed] = self._shifts(changed)

    def _shifts(self, places: Ints | slice) -> Ints:
        seen, hits, believed = 16 * self._seen[places], 16 * self._hits[places], self._believed[places]
        expected = self._expected[places] >> 12
        counts = np.empty((4, seen.size))
        counts[0], counts[1], counts[2], counts[3] = hits, expected, seen - hits, seen - expected
        counts += believed
        more, less, fewer, rest = quarter_octaves(counts)
        shifts: Ints = more - less - fewer + rest
        return shifts


def _resized(array: Ints, first: int, size: int, new: int = 0) -> NDArray[np.int64]:
    """Return a copy, shape (size,), with the entries before `first`, and `new` in all other entries."""
    resized = np.full(size, new, np.int64)
    resized[:first] = array[:first]
    return resized


class Walk:
    """Visits the blocks of one mask and codes their booleans."""

    def __init__(self) -> None:
        self._counts = _Counts()
        self._first_row = _KINDS  # rows are counted after the columns
        self._seen = self._hits = 0

    def start_tensor(self, num_columns: int) -> None:
        self._first_row = _KINDS + num_columns
        self._counts.begin_anew(_KINDS, self._first_row)

    def block(self, rows: Ints, columns: Ints, code: CodeBatch) -> MaskArray:
        """Code the booleans of a block of the tensor, and return them in the block's order.

        Args:
            rows: row of each boolean in the block, shape (n,).
            columns: column of each boolean in the tensor, same shape.
            code: function that writes or reads the booleans of a batch.
        """
        self._counts.begin_anew(self._first_row, self._first_row + int(rows.max()) + 1)
        axes = np.empty((2, rows.size), np.int32)
        axes[0], axes[1] = columns + _KINDS, rows + self._first_row
        size, stride = rows.size, 1
        while size > FIRST * stride:
            stride *= 2
        booleans = np.zeros(size, np.bool_)
        booleans[::stride] = self._coarsest(axes[:, ::stride], slice(0, size, stride), code)
        while stride > 1:
            stride //= 2
            batch = slice(stride, size, 2 * stride)
            booleans[batch] = self._finer(axes[:, batch], booleans[:: 2 * stride], batch, code)
        self._seen += size
        self._hits += int(np.count_nonzero(booleans))
        return booleans

    def _coarsest(self, axes: Ints, batch: slice, code: CodeBatch) -> MaskArray:
        """Code the first booleans of a block, which have no known neighbours, and return them."""
        known = np.array([self._hits + 1, self._seen - self._hits + 1])
        level = _HELD[int(np.subtract(*quarter_octaves(known))) + _BOUND]
        levels = np.full(axes.shape[1], level)
        booleans = code(levels, batch)
        self._counts.add((*axes,), (levels, levels), booleans)
        return booleans

    def _finer(self, axes: Ints, known: MaskArray, batch: slice, code: CodeBatch) -> MaskArray:
        """Code the booleans of a batch between known ones, and return them; `axes` has their columns and
        rows.
        """
        near, neighbours = _near(known, axes.shape[1])
        by_axis = self._counts.shifts[axes]
        both = by_axis[0] + by_axis[1]
        expected = _HELD[near + both + _BOUND]
        kinds = _KIND_OF_NEAR[near + _BOUND] + _KIND_OF_SHIFT[both + _BOUND] + neighbours
        levels = _HELD[expected + self._counts.shifts[kinds] + _BOUND]
        booleans = code(levels, batch)
        by_axis += near
        self._counts.add((kinds, *axes), (expected, by_axis[1], by_axis[0]), booleans)
        return booleans


def _near(known: MaskArray, size: int) -> tuple[Ints, Ints]:
    """Return the level that known nearby booleans give each new boolean, and how many of its neighbours are
    True.

    The estimate starts with a wide range, and gives nearer booleans more weight.
    """
    # Number of True booleans up to each place, padded at both ends. Floats are exact here: quotients are
    # below 2^16 and have a divisor of at most 80. So they are farther from the next whole number than the
    # rounding error.
    seen = np.arange(-_FAR, known.size + _FAR + 1, dtype=np.float32)
    np.clip(seen, 0, known.size, out=seen)
    hits = np.zeros_like(seen)
    np.cumsum(known, out=hits[_FAR + 1 : _FAR + 1 + known.size])
    hits[_FAR + 1 + known.size :] = num_hits = hits[_FAR + known.size]
    chance = np.full(size, (2 * int(num_hits) + 1) * TOTAL // (2 * known.size + 2), np.float32)
    inside = hits
    for reach, believed in _NEAR:
        ahead, behind = _FAR + 1 + reach, _FAR + 1 - reach
        inside = hits[ahead : ahead + size] - hits[behind : behind + size]
        among = seen[ahead : ahead + size] - seen[behind : behind + size]
        chance = np.floor((inside * TOTAL + believed * chance) / (among + believed))
    return _LEVELS[chance.astype(np.int64)], inside.astype(np.int64)


BLOCK = 1 << 14  # booleans; the memory that reading needs in addition to the mask grows with it
# largest coded mask: one to two seconds of work on the test machine, more on a small board
MOST_BOOLEANS = 1 << 21
SMALLEST = 48  # bytes of a compressed bitmap; a code cannot save anything below
_EVEN, _BY_PLACE, _BY_REFERENCE, _FORMS = 0, 1, 2, 8  # forms from 3 on are reserved for later versions
_ROW_UNKNOWN = 64
_SLACK = 8  # bytes of form, level and the end of a range code
# cost of a True boolean by its level, in 2^-16 bits
_BITS: list[int] = np.rint(-65536 * np.log2(CHANCES / TOTAL)).astype(np.int64).tolist()


@dataclass(frozen=True)
class _Tensor:
    """Booleans of a mask that belong to one tensor, in the order of the flat vector.

    Attributes:
        start, stop: range of these booleans in the mask.
        row_size: number of booleans in a row; 0 if there are no rows or they are unknown.
        reference: values that both sides hold of these entries; None if they hold none.
    """

    start: int
    stop: int
    row_size: int
    reference: ReferenceModel | None

    def blocks(self) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Yield each block's booleans in coding order: places in the mask, rows and columns, shapes (n,)."""
        for start in range(self.start, self.stop, BLOCK):
            block = slice(start, min(start + BLOCK, self.stop))
            places = np.arange(start - self.start, block.stop - self.start)
            first_row = places[0] // (self.row_size or _ROW_UNKNOWN)
            keys = _shuffling(places) if self.reference is None else _magnitudes(self.reference, block)
            places = places[_by(keys)]
            rows = places // (self.row_size or _ROW_UNKNOWN)
            columns = places % self.row_size if self.row_size else np.zeros_like(places)
            rows -= first_row
            places += self.start
            yield places, rows, columns


def _by(keys: NDArray[np.uint32]) -> Ints:
    """Return indices that sort the keys; ties keep their order.

    It sorts by the lower half, then by the upper half, because numpy sorts 16-bit numbers in one pass.
    """
    lower = np.argsort(keys.astype(np.uint16), kind="stable")
    return lower[np.argsort((keys >> np.uint32(16)).astype(np.uint16)[lower], kind="stable")]


def _magnitudes(reference: ReferenceModel, block: slice) -> NDArray[np.uint32]:
    """Return sort keys in the order of the reference's magnitude; 0 for entries outside the reference."""
    magnitudes = np.abs(reference.values[block]).view(np.uint32) + np.uint32(1)
    magnitudes[~reference.held[block]] = 0
    return magnitudes


def _shuffling(places: Ints) -> NDArray[np.uint32]:
    """Return sort keys that scatter the booleans, so that each row and column has some booleans early."""
    return places.astype(np.uint32) * np.uint32(0x9E3779B1)


def write_mask(
    mask: MaskArray, spec: ModelSpec, reference: ReferenceModel | None, time: CodingTime | None = None
) -> bytes | None:
    """Return the smallest code of a mask; None if the compressed bitmap is as small, or arrives sooner.

    Args:
        mask: mask of any shape.
        spec: the model.
        reference: values that both sides hold; None if they hold none.
        time: speed of the device and its link; None to ignore time.
    """
    booleans = mask.ravel()
    bitmap = np.packbits(booleans).tobytes()
    plain = min(len(bitmap), len(zstandard.ZstdCompressor(level=3).compress(bitmap)))
    if plain < SMALLEST or booleans.size > min(spec.size, MOST_BOOLEANS):
        return None
    hits = int(np.count_nonzero(booleans))
    even = _bytes_at(_level(hits, booleans.size), hits, booleans.size)
    if time is not None and not time.pays(booleans.size, plain, even):
        return None
    data = predicted(booleans, spec, reference)
    if even < len(data):
        data = evenly(booleans)
    return data if len(data) < plain else None


def evenly(booleans: MaskArray) -> bytes:
    """Return the code with one probability for all booleans; `booleans` has the shape (n,)."""
    level = _level(int(np.count_nonzero(booleans)), booleans.size)
    out = RangeEncoder()
    out.write(_EVEN, 1, _FORMS)
    out.write(level + MOST, 1, 2 * MOST + 1)
    for start in range(0, booleans.size, BLOCK):
        here = booleans[start : start + BLOCK]
        write_booleans(out, here, np.full(here.size, level))
    return out.finish()


def predicted(booleans: MaskArray, spec: ModelSpec, reference: ReferenceModel | None) -> bytes:
    """Return the code that predicts each boolean from the reference and earlier booleans; shape (n,)."""
    reference = reference if booleans.size == spec.num_parameters else None
    out, walk = RangeEncoder(), Walk()
    out.write(_BY_PLACE if reference is None else _BY_REFERENCE, 1, _FORMS)
    for tensor in _tensors(booleans.size, spec, reference):
        walk.start_tensor(max(1, tensor.row_size))
        for order, rows, columns in tensor.blocks():
            batches = _Batches(booleans[order])
            walk.block(rows, columns, batches.add)
            batches.write(out)
    return out.finish()


def read_mask(data: bytes, size: int, spec: ModelSpec, reference: ReferenceModel | None) -> MaskArray:
    """Read a mask of `size` booleans that `write_mask` wrote, shape (size,).

    Raises:
        PacketCorrupt, PacketTruncated: `write_mask` cannot have written these bytes with this reference.
    """
    if size > MOST_BOOLEANS:
        raise PacketCorrupt(f"coded mask of {size} booleans; at most {MOST_BOOLEANS} are allowed")
    reference = reference if size == spec.num_parameters else None
    source = RangeDecoder(data)
    form = source.read_even(_FORMS)
    booleans = np.zeros(size, np.bool_)
    if form == _EVEN:
        level = source.read_even(2 * MOST + 1)
        for start in range(0, size, BLOCK):
            here = booleans[start : start + BLOCK]
            here[:] = read_booleans(source, np.full(here.size, level - MOST))
    elif form == (_BY_PLACE if reference is None else _BY_REFERENCE):
        walk = Walk()
        for tensor in _tensors(size, spec, reference):
            walk.start_tensor(max(1, tensor.row_size))
            for order, rows, columns in tensor.blocks():
                booleans[order] = walk.block(rows, columns, lambda levels, _: read_booleans(source, levels))
    else:
        raise PacketCorrupt(
            f"mask of form {form}: written with another reference model, or by a later version"
        )
    source.finish()
    return booleans


class _Batches:
    """Collects the batches of a block, because coding them together takes about as long as one batch.

    Args:
        booleans: booleans of the block, in coding order.
    """

    def __init__(self, booleans: MaskArray) -> None:
        self._booleans = booleans
        self._batches: list[tuple[MaskArray, Ints]] = []

    def add(self, levels: Ints, batch: slice) -> MaskArray:
        """Add one batch and return its booleans; usable as a `CodeBatch`."""
        booleans = self._booleans[batch]
        self._batches.append((booleans, levels))
        return booleans

    def write(self, out: RangeEncoder) -> None:
        booleans, levels = (np.concatenate(parts) for parts in zip(*self._batches, strict=True))
        sizes = [own.size for own, _ in self._batches]
        write_symbols(
            out, symbols_of(booleans, levels, np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes))
        )


def _tensors(size: int, spec: ModelSpec, reference: ReferenceModel | None) -> Iterator[_Tensor]:
    """Yield the model's tensors if the mask has one boolean for each parameter, else one tensor."""
    if size != spec.num_parameters:
        yield _Tensor(0, size, 0, reference)
        return
    start = 0
    for tensor in spec.tensors:
        stop = start + tensor.size
        if tensor.kind != "stat" and tensor.size:
            row_size = tensor.size // tensor.shape[0] if tensor.shape else 1
            yield _Tensor(start, stop, row_size if 1 < row_size <= BLOCK else 0, reference)
        start = stop


def _level(hits: int, size: int) -> int:
    """Return the level of `size` booleans of which `hits` are True."""
    true, false = quarter_octaves(np.array([hits + 1, size - hits + 1]))
    return max(-MOST, min(int(true - false), MOST))


def _bytes_at(level: int, hits: int, size: int) -> int:
    """Return the bytes of `size` booleans of one level, of which `hits` are True."""
    num_bits: int = (hits * _BITS[MOST + level] + (size - hits) * _BITS[MOST - level]) >> 16
    return num_bits // 8 + _SLACK
