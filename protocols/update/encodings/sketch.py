"""All that changed as a few random sums, a bit each: a fraction of a percent of int8, and right on average.

One update read back is mostly noise: with one bit for fifty entries its error is nine times the change. But
errors of devices and rounds have nothing in common, and what federated learning takes is a mean over both:
with ten devices a round FedAvg learns as fast as from whole updates, and as well (docs/wire-benchmarks.md).
That is EDEN's principle (Vargaftik et al. 2022, arXiv:2108.08842) at a fiftieth of its bit. Where we differ:
below one bit it sends some entries, drawn at random; here all are added up (`random_sums.py`), which needs no
draw of places. Nothing waits on the device. Bytes: docs/wire.md, `sketch`.
"""

import struct
from dataclasses import dataclass
from math import sqrt

import numpy as np

from fleetune.protocols.errors import PacketCorrupt, SettingError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.chunks import LARGEST, difference, part_of, wanted_of
from fleetune.protocols.update.encodings.encoding import Encoded, Encoding, EncodingCost, Known
from fleetune.protocols.update.encodings.random_sums import (
    NOISE,
    RandomSums,
    fitting_log,
    most_log,
    random_sums,
)

_AS_THEY_ARE, _UNCHANGED, _SUMS = b"\0", b"\1", b"\2"
_FRAME_BYTES = 16  # its own, and of a payload's compression, which gains nothing on bits
_HEAD = struct.Struct("<BHf")


@dataclass(frozen=True)
class Sketch(Encoding):
    """Random sums of differences to the base.

    Attributes:
        bits: for each entry, above 0 and at most 1.
    """

    bits: float = 0.02

    name = "sketch"
    lossless = False

    def __post_init__(self) -> None:
        if not 0 < self.bits <= 1:
            raise SettingError(f"sketch: bits {self.bits}; take a number above 0, at most 1")

    @property
    def cost(self) -> EncodingCost:
        return EncodingCost(
            bytes_per_value=self.bits / 8, encode_ns=12, decode_ns=8, relative_error=sqrt(NOISE / self.bits)
        )

    def size(self, num_values: int) -> int:
        return int(self.bits / 8 * num_values) + _FRAME_BYTES if num_values else 0

    def for_tasks(self) -> Encoding:
        raise SettingError("sketch is for `up` alone, where means are taken: take lowrank or sparse")

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        base = known.base
        if base is None:
            return _whole(values, residual)

        def change(chunk: slice) -> FlatArray:
            return difference(wanted_of(values, residual, chunk), part_of(base, chunk))

        log = fitting_log(values.size, self.bits)
        sums = random_sums(change, values.size, 1 << log, key)
        if sums is None:
            return Encoded(_UNCHANGED)
        if sums.most + max(float(base.max()), -float(base.min())) >= float(LARGEST):
            return _whole(values, residual)
        return Encoded(_SUMS + _HEAD.pack(log, sums.seed, sums.scale) + np.packbits(sums.above).tobytes())

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        tag = data[:1]
        if tag == _AS_THEY_ARE:
            _check_length(data, 1 + 4 * count)
            return np.frombuffer(data, "<f4", offset=1).astype(np.float32)
        if known.base is None:
            raise PacketCorrupt("a sketch of differences to a base that this side does not hold")
        values = known.base if known.spare else known.base.copy()
        if tag == _UNCHANGED:
            _check_length(data, 1)
            return values
        with np.errstate(over="ignore", invalid="ignore"):
            for chunk, told in _read(data, count).entries(count):
                values[chunk] += told
        return values


def _whole(values: FlatArray, residual: FlatArray | None) -> Encoded:
    """Where there is nothing to differ from, or noise could lead beyond float32."""
    return Encoded(_AS_THEY_ARE + wanted_of(values, residual, slice(None)).astype("<f4").tobytes())


def _read(data: bytes, count: int) -> RandomSums:
    if data[:1] != _SUMS or len(data) < 1 + _HEAD.size:
        raise PacketCorrupt(
            f"a sketch of {len(data)} bytes begins with {data[:1]!r}; this side knows 0, 1, 2"
        )
    log, seed, scale = _HEAD.unpack_from(data, 1)
    if not 3 <= log <= most_log(count):
        raise PacketCorrupt(f"a sketch of 2^{log} sums of {count} values")
    if not 0 < scale < float("inf"):
        raise PacketCorrupt(f"a sketch whose scale is {scale}")
    _check_length(data, 1 + _HEAD.size + (1 << log) // 8)
    above = np.unpackbits(np.frombuffer(data, np.uint8, offset=1 + _HEAD.size)).astype(np.bool_)
    return RandomSums(seed, np.float32(scale), above)


def _check_length(data: bytes, length: int) -> None:
    if len(data) != length:
        raise PacketCorrupt(f"a sketch of {len(data)} bytes; {length} are due")
