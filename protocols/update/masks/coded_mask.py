"""A mask as one range code, with all booleans equally likely or each predicted from what both sides hold.

A mask with one boolean for each parameter of the model is coded tensor by tensor, in blocks. The booleans of
a block are sorted by the magnitude of the reference. Any other mask is one tensor with unknown rows. Bytes:
docs/wire.md, Masks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import MaskArray, ModelSpec
from fleetune.protocols.update.entropy.boolean_levels import CHANCES, MOST, TOTAL
from fleetune.protocols.update.entropy.boolean_symbols import symbols_of
from fleetune.protocols.update.entropy.booleans import read_booleans, write_booleans
from fleetune.protocols.update.entropy.quarter_octaves import Ints, quarter_octaves
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder
from fleetune.protocols.update.entropy.symbols import write_symbols
from fleetune.protocols.update.masks.coding_time import CodingTime
from fleetune.protocols.update.masks.context import Walk
from fleetune.protocols.update.reference_model import ReferenceModel

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
        """Places in the mask of each block's booleans, in coding order, with their rows and columns, shapes
        (n,).
        """
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
    """Indices that sort the keys, ties in order.

    It sorts by the lower half, then by the upper half, because numpy sorts 16-bit numbers in one pass.
    """
    lower = np.argsort(keys.astype(np.uint16), kind="stable")
    return lower[np.argsort((keys >> np.uint32(16)).astype(np.uint16)[lower], kind="stable")]


def _magnitudes(reference: ReferenceModel, block: slice) -> NDArray[np.uint32]:
    """Sort keys in the order of the reference's magnitude; 0 for entries that the reference does not hold."""
    magnitudes = np.abs(reference.values[block]).view(np.uint32) + np.uint32(1)
    magnitudes[~reference.held[block]] = 0
    return magnitudes


def _shuffling(places: Ints) -> NDArray[np.uint32]:
    """Sort keys that scatter the booleans, so that each row and column has some booleans early."""
    return places.astype(np.uint32) * np.uint32(0x9E3779B1)


def write_mask(
    mask: MaskArray, spec: ModelSpec, reference: ReferenceModel | None, time: CodingTime | None = None
) -> bytes | None:
    """The smallest code of a mask; None if the compressed bitmap is at least as small, or arrives sooner.

    Args:
        mask: mask of any shape.
        spec: the model.
        reference: values that both sides hold; None if they hold none.
        time: speed of the device and its link; None if time does not matter.
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
    """Code with one probability for all booleans; `booleans` has the shape (n,)."""
    level = _level(int(np.count_nonzero(booleans)), booleans.size)
    out = RangeEncoder()
    out.write(_EVEN, 1, _FORMS)
    out.write(level + MOST, 1, 2 * MOST + 1)
    for start in range(0, booleans.size, BLOCK):
        here = booleans[start : start + BLOCK]
        write_booleans(out, here, np.full(here.size, level))
    return out.finish()


def predicted(booleans: MaskArray, spec: ModelSpec, reference: ReferenceModel | None) -> bytes:
    """Code that predicts each boolean from the reference and the booleans before; `booleans` has the shape
    (n,).
    """
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
        PacketCorrupt, PacketTruncated: it never writes such bytes, or not with this reference.
    """
    if size > MOST_BOOLEANS:
        raise PacketCorrupt(f"coded mask of {size} booleans; at most {MOST_BOOLEANS}")
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
            "a mask written with a reference where this side has none, or without, or a later form"
        )
    source.finish()
    return booleans


class _Batches:
    """Batches of a block, which are coded together: many batches take about as long as one.

    Args:
        booleans: booleans of the block, in coding order.
    """

    def __init__(self, booleans: MaskArray) -> None:
        self._booleans = booleans
        self._batches: list[tuple[MaskArray, Ints]] = []

    def add(self, levels: Ints, batch: slice) -> MaskArray:
        """Add one batch, as a `context.CodeBatch`, and return its booleans."""
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
    """Tensors of the model if the mask has one boolean for each parameter, else one tensor."""
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
    """Level of `size` booleans of which `hits` are True."""
    true, false = quarter_octaves(np.array([hits + 1, size - hits + 1]))
    return max(-MOST, min(int(true - false), MOST))


def _bytes_at(level: int, hits: int, size: int) -> int:
    """Bytes of `size` booleans of one level, of which `hits` are True."""
    num_bits: int = (hits * _BITS[MOST + level] + (size - hits) * _BITS[MOST - level]) >> 16
    return num_bits // 8 + _SLACK
