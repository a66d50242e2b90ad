"""A mask as one range code, with all flags equally likely or each predicted from what both sides hold.

A mask with one flag for each parameter of the model is coded tensor by tensor, in blocks. The flags of a
block are sorted by the magnitude of the base. Any other mask is one tensor with unknown rows. Bytes:
docs/wire.md, Masks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import MaskArray, ModelSpec
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.entropy.flag_levels import CHANCES, MOST, TOTAL
from fleetune.protocols.update.entropy.flag_symbols import symbols_of
from fleetune.protocols.update.entropy.flags import read_flags, write_flags
from fleetune.protocols.update.entropy.quarter_octaves import Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder
from fleetune.protocols.update.entropy.symbols import write_symbols
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.masks.context import Walk

BLOCK = 1 << 14  # flags; the memory that reading needs in addition to the mask grows with it
# largest coded mask: one to two seconds of work on the test machine, more on a small board
MOST_FLAGS = 1 << 21
SMALLEST = 48  # bytes of a compressed bitmap; a code cannot save anything below
_EVEN, _BY_PLACE, _BY_BASE, _FORMS = 0, 1, 2, 8  # forms from 3 on are reserved for later versions
_ROW_UNKNOWN = 64
_SLACK = 8  # bytes of form, level and the end of a range code
# cost of a True flag by its level, in 2^-16 bits
_BITS: list[int] = np.rint(-65536 * np.log2(CHANCES / TOTAL)).astype(np.int64).tolist()


@dataclass(frozen=True)
class _Tensor:
    """Flags of a mask that belong to one tensor, in the order of the flat vector.

    Attributes:
        start, stop: range of these flags in the mask.
        row_size: number of flags in a row; 0 if there are no rows or they are unknown.
        base: values that both sides hold of these entries; None if they hold none.
    """

    start: int
    stop: int
    row_size: int
    base: Base | None

    def blocks(self) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Places in the mask of each block's flags, in coding order, with their rows and columns, shapes
        (n,).
        """
        for start in range(self.start, self.stop, BLOCK):
            block = slice(start, min(start + BLOCK, self.stop))
            places = np.arange(start - self.start, block.stop - self.start)
            first_row = places[0] // (self.row_size or _ROW_UNKNOWN)
            keys = _shuffling(places) if self.base is None else _magnitudes(self.base, block)
            places = places[_by(keys)]
            rows = places // (self.row_size or _ROW_UNKNOWN)
            columns = places % self.row_size if self.row_size else np.zeros_like(places)
            rows -= first_row
            places += self.start
            yield places, rows, columns


def _by(keys: NDArray[np.uint32]) -> Ints:
    """Indices that sort the keys, ties in order.

    It sorts by the lower half, then by the upper half, because numpy sorts 16-bit numbers in one pass.
    """
    lower = np.argsort(keys.astype(np.uint16), kind="stable")
    return lower[np.argsort((keys >> np.uint32(16)).astype(np.uint16)[lower], kind="stable")]


def _magnitudes(base: Base, block: slice) -> NDArray[np.uint32]:
    """Sort keys in the order of the base's magnitude; 0 for entries that the base does not hold."""
    magnitudes = np.abs(base.values[block]).view(np.uint32) + np.uint32(1)
    magnitudes[~base.held[block]] = 0
    return magnitudes


def _shuffling(places: Ints) -> NDArray[np.uint32]:
    """Sort keys that scatter the flags, so that each row and column has some flags early."""
    return places.astype(np.uint32) * np.uint32(0x9E3779B1)


def write_mask(
    mask: MaskArray, spec: ModelSpec, base: Base | None, time: CodingTime | None = None
) -> bytes | None:
    """The smallest code of a mask; None if the compressed bitmap is at least as small, or arrives sooner.

    Args:
        mask: mask of any shape.
        spec: the model.
        base: values that both sides hold; None if they hold none.
        time: speed of the device and its link; None if time does not matter.
    """
    flags = mask.ravel()
    bitmap = np.packbits(flags).tobytes()
    plain = min(len(bitmap), len(zstandard.ZstdCompressor(level=3).compress(bitmap)))
    if plain < SMALLEST or flags.size > min(spec.size, MOST_FLAGS):
        return None
    hits = int(np.count_nonzero(flags))
    even = _bytes_at(_level(hits, flags.size), hits, flags.size)
    if time is not None and not time.pays(flags.size, plain, even):
        return None
    data = predicted(flags, spec, base)
    if even < len(data):
        data = evenly(flags)
    return data if len(data) < plain else None


def evenly(flags: MaskArray) -> bytes:
    """Code with one probability for all flags; `flags` has the shape (n,)."""
    level = _level(int(np.count_nonzero(flags)), flags.size)
    out = RangeEncoder()
    out.write(_EVEN, 1, _FORMS)
    out.write(level + MOST, 1, 2 * MOST + 1)
    for start in range(0, flags.size, BLOCK):
        here = flags[start : start + BLOCK]
        write_flags(out, here, np.full(here.size, level))
    return out.finish()


def predicted(flags: MaskArray, spec: ModelSpec, base: Base | None) -> bytes:
    """Code that predicts each flag from the base and the flags before; `flags` has the shape (n,)."""
    base = base if flags.size == spec.num_parameters else None
    out, walk = RangeEncoder(), Walk()
    out.write(_BY_PLACE if base is None else _BY_BASE, 1, _FORMS)
    for tensor in _tensors(flags.size, spec, base):
        walk.start_tensor(max(1, tensor.row_size))
        for order, rows, columns in tensor.blocks():
            batches = _Batches(flags[order])
            walk.block(rows, columns, batches.add)
            batches.write(out)
    return out.finish()


def read_mask(data: bytes, size: int, spec: ModelSpec, base: Base | None) -> MaskArray:
    """Read a mask of `size` flags that `write_mask` wrote, shape (size,).

    Raises:
        PacketCorrupt, PacketTruncated: it never writes such bytes, or not with this base.
    """
    if size > MOST_FLAGS:
        raise PacketCorrupt(f"coded mask of {size} flags; at most {MOST_FLAGS}")
    base = base if size == spec.num_parameters else None
    source = RangeDecoder(data)
    form = source.read_even(_FORMS)
    flags = np.zeros(size, np.bool_)
    if form == _EVEN:
        level = source.read_even(2 * MOST + 1)
        for start in range(0, size, BLOCK):
            here = flags[start : start + BLOCK]
            here[:] = read_flags(source, np.full(here.size, level - MOST))
    elif form == (_BY_PLACE if base is None else _BY_BASE):
        walk = Walk()
        for tensor in _tensors(size, spec, base):
            walk.start_tensor(max(1, tensor.row_size))
            for order, rows, columns in tensor.blocks():
                flags[order] = walk.block(rows, columns, lambda levels, _: read_flags(source, levels))
    else:
        raise PacketCorrupt(
            "a mask written with a base where this side has none, or without, or a later form"
        )
    source.finish()
    return flags


class _Batches:
    """Batches of a block, which are coded together: many batches take about as long as one.

    Args:
        flags: flags of the block, in coding order.
    """

    def __init__(self, flags: MaskArray) -> None:
        self._flags = flags
        self._batches: list[tuple[MaskArray, Ints]] = []

    def add(self, levels: Ints, batch: slice) -> MaskArray:
        """Add one batch, as a `context.CodeBatch`, and return its flags."""
        flags = self._flags[batch]
        self._batches.append((flags, levels))
        return flags

    def write(self, out: RangeEncoder) -> None:
        flags, levels = (np.concatenate(parts) for parts in zip(*self._batches, strict=True))
        sizes = [own.size for own, _ in self._batches]
        write_symbols(
            out, symbols_of(flags, levels, np.repeat(np.arange(len(sizes), dtype=np.uint16), sizes))
        )


def _tensors(size: int, spec: ModelSpec, base: Base | None) -> Iterator[_Tensor]:
    """Tensors of the model if the mask has one flag for each parameter, else one tensor with all flags."""
    if size != spec.num_parameters:
        yield _Tensor(0, size, 0, base)
        return
    start = 0
    for tensor in spec.tensors:
        stop = start + tensor.size
        if tensor.kind != "stat" and tensor.size:
            row_size = tensor.size // tensor.shape[0] if tensor.shape else 1
            yield _Tensor(start, stop, row_size if 1 < row_size <= BLOCK else 0, base)
        start = stop


def _level(hits: int, size: int) -> int:
    """Level of `size` flags of which `hits` are True."""
    true, false = quarter_octaves(np.array([hits + 1, size - hits + 1]))
    return max(-MOST, min(int(true - false), MOST))


def _bytes_at(level: int, hits: int, size: int) -> int:
    """Bytes of `size` flags of one level, of which `hits` are True."""
    num_bits: int = (hits * _BITS[MOST + level] + (size - hits) * _BITS[MOST - level]) >> 16
    return num_bits // 8 + _SLACK
