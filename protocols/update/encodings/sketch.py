"""Encoding `sketch`: changes as few bits for all entries; noisy in one update, right in the mean of many.

All changes are added up in random sums, and one bit of each sum is sent (`random_sums.py`). One decoded
update is mostly noise: with one bit for fifty entries, its error is nine times the change. But the errors of
devices and rounds are independent, and federated learning takes a mean over both. With ten devices a round,
FedAvg learns as fast and as well as from whole updates (docs/wire-benchmarks.md). The device keeps no
residual that could grow stale.

If only few entries change much (the word vectors of a text), the noise in all other entries does more harm
than the sums do good. Then `step` sends the largest changes first, as a few outer products in coarse steps
(`lowrank`), and the sums cover the remainder.

Sums apply the principle of EDEN (Vargaftik et al. 2022, arXiv:2108.08842) at a fiftieth of its bit. Differs
from the paper: below one bit, EDEN sends some entries, drawn at random; here all entries are added up, which
needs no random choice of entries. Bytes: docs/wire.md, `sketch`.
"""

import math
import struct
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.errors import PacketCorrupt, SettingError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.chunks import (
    AS_THEY_ARE,
    LARGEST,
    check_length,
    difference,
    part_of,
    read_whole,
    wanted_of,
    whole,
)
from fleetune.protocols.update.encodings.encoding import Encoded, Encoding, EncodingCost, Known
from fleetune.protocols.update.encodings.lowrank import LowRank
from fleetune.protocols.update.encodings.random_sums import (
    NOISE,
    RandomSums,
    fitting_log,
    most_log,
    random_sums,
)

_DIFFERENCES, _SUMS, _PRODUCTS = 1, 2, 4  # flags of the first byte
# bytes of the encoding's head and of the payload's compression, which does not shrink random bits
_FRAME_BYTES = 16
_HEAD = struct.Struct("<BHf")
_UNTOLD = 0.11  # share of the norm that products in steps of one root mean square leave


@dataclass(frozen=True)
class Sketch(Encoding):
    """Writes outer products and random sums of differences to the reference.

    Attributes:
        bits: number of sums for each entry, above 0 and at most 1.
        step: step width of the outer products that go first, see `lowrank`. Values of 4 to 12 pay off; 0 for
            sums only.
    """

    bits: float = 0.02
    step: float = 0.0

    name = "sketch"
    leak = None
    lossless = False
    on_average = True

    def __post_init__(self) -> None:
        if not 0 < self.bits <= 1:
            raise SettingError(f"encoding sketch: bits = {self.bits} must be above 0 and at most 1")
        if not 0 <= self.step < math.inf:
            raise SettingError(f"encoding sketch: step = {self.step} must be 0 or above")

    @property
    def cost(self) -> EncodingCost:
        products = LowRank(self.step).cost if self.step else EncodingCost(0, 0, 0)
        remainder = math.tanh(_UNTOLD * self.step) if self.step else 1.0
        return EncodingCost(
            bytes_per_value=self.bits / 8 + products.bytes_per_value,
            encode_ns=12 + products.encode_ns,
            decode_ns=8 + products.decode_ns,
            relative_error=remainder * math.sqrt(NOISE / self.bits),
        )

    def size(self, num_values: int) -> int:
        return int(self.cost.bytes_per_value * num_values) + _FRAME_BYTES if num_values else 0

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        reference = known.reference
        if reference is None:
            return whole(values, residual)
        low_rank = LowRank(self.step).encode(values, known, residual, key) if self.step else Encoded(b"")
        remainder = low_rank.residual

        def remaining(chunk: slice) -> FlatArray:
            if remainder is not None:
                return remainder[chunk]
            return difference(wanted_of(values, residual, chunk), part_of(reference, chunk))

        log = fitting_log(values.size, self.bits)
        sums = random_sums(remaining, values.size, 1 << log, key)
        if sums is None:
            return Encoded(_framed(low_rank.data, b""))
        known_sizes = sum(_largest(one) for one in (reference, values, remainder) if one is not None)
        if known_sizes + sums.most >= float(LARGEST):
            return whole(values, residual)
        bits = np.packbits(sums.above).tobytes()
        return Encoded(_framed(low_rank.data, _HEAD.pack(log, sums.seed, sums.scale) + bits))

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        form = data[0] if data else -1
        if form == AS_THEY_ARE:
            return read_whole(data, count)
        if form & ~(_SUMS | _PRODUCTS) != _DIFFERENCES:
            raise PacketCorrupt(f"a sketch of {len(data)} bytes begins with {data[:1]!r}")
        if known.reference is None:
            raise PacketCorrupt(
                "the sketch holds differences to a reference model that this side does not have"
            )
        sums, end = _read_sums(data, count) if form & _SUMS else (None, 1)
        if form & _PRODUCTS:
            values = LowRank().decode(data[end:], count, known)
        else:
            check_length(data, end)
            values = known.start(count)
        if sums is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                for chunk, low_rank in sums.entries(count):
                    values[chunk] += low_rank
        return values


def _framed(products: bytes, sums: bytes) -> bytes:
    form = _DIFFERENCES | (_SUMS if sums else 0) | (_PRODUCTS if products else 0)
    return bytes([form]) + sums + products


def _largest(values: FlatArray) -> float:
    return max(float(values.max()), -float(values.min()))


def _read_sums(data: bytes, count: int) -> tuple[RandomSums, int]:
    """Read the sums, and return them with the position of their end."""
    if len(data) < 1 + _HEAD.size:
        raise PacketCorrupt(f"a sketch is cut short after {len(data)} bytes")
    log, seed, scale = _HEAD.unpack_from(data, 1)
    if not 3 <= log <= most_log(count):
        raise PacketCorrupt(
            f"a sketch of {count} values has 2^{log} sums; expected 2^3 to 2^{most_log(count)}"
        )
    if not 0 < scale < math.inf:
        raise PacketCorrupt(f"a sketch with the invalid scale {scale}")
    start, end = 1 + _HEAD.size, 1 + _HEAD.size + (1 << log) // 8
    if len(data) < end:
        check_length(data, end)
    above = np.unpackbits(np.frombuffer(data[start:end], np.uint8)).astype(np.bool_)
    return RandomSums(seed, np.float32(scale), above), end
