"""Encoding `sparse`: the largest changes, coarsely; the other changes wait in the residual for a later round.

The largest differences to the reference are sent, with signs and a few levels of magnitude. With one level
this is sparse ternary compression with error feedback (Sattler et al. 2019, arXiv:1903.02891).

Differs from the paper: places are coded by rows and columns (sparse_entries.py) instead of Golomb codes.
Signs are predicted from the signs of their row. Several levels describe the largest changes better than one
mean: for LeNet-5 at a density of 0.05, the remaining norm is 0.48 instead of 0.70 of the norm of the
differences. Bytes: docs/wire.md, `sparse`.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, PacketNotFinite, SettingError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.encoding import Encoded, Encoding, EncodingCost, Known
from fleetune.protocols.update.encodings.sparse_entries import (
    MAX_LEVELS,
    Reader,
    Writer,
    tensors_of,
)
from fleetune.protocols.update.entropy.octaves import MAGNITUDES, SUBNORMAL, Ints, magnitude
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder

_AS_THEY_ARE, _DIFFERENCES, _FORMS = 0, 1, 8  # forms from 2 on are reserved for later versions
_STRIDE_LENGTHS = 13  # the step from one magnitude to the next has at most 12 bits
_LOG_STEPS = (34219, 37316, 40693, 44376, 48393, 52773, 57549, 62757)  # 2^15 * 2^((k + 1/2) / 8)
_BIN = 2.0  # 1.5 to 3 give about the same distortion for the same bytes
_FINEST_ERROR, _ERROR_SLOPE, _TERNARY_ERROR = 0.24, -0.21, 0.75  # measured, see `Sparse.cost`
_LARGEST = np.finfo(np.float32).max


@dataclass(frozen=True)
class Sparse(Encoding):
    """Sends a fraction of the entries, each with a sign and a level of magnitude.

    Attributes:
        density: fraction of the entries that is sent, above 0 and at most 1.
        levels: number of levels of magnitude, 1 to 16. With 1, all entries get the mean magnitude.
        span: how magnitudes are divided into levels. With `mean`, each level is twice as wide as the distance
            from the least to the mean magnitude, and the last is open; this takes the fewest bytes. With
            `all`, levels divide the square roots of magnitudes evenly up to the largest; this has the least
            error and pays off with 16 levels and a density of 0.1 and more.
    """

    density: float = 0.02
    levels: int = 8
    span: Literal["mean", "all"] = "mean"

    name = "sparse"
    leak = "it sends the places of the largest changes, which follow from the device's data"
    lossless = False

    def __post_init__(self) -> None:
        if not 0 < self.density <= 1:
            raise SettingError(f"encoding sparse: density = {self.density} must be above 0 and at most 1")
        if not 1 <= self.levels <= MAX_LEVELS:
            raise SettingError(f"encoding sparse: levels = {self.levels} must be 1 to {MAX_LEVELS}")

    @property
    def cost(self) -> EncodingCost:
        """Return the predicted cost for these settings.

        Places and signs are taken to need 0.75 of the bits of an unpredicted code. Measured: 0.42 to 0.56 for
        FedAvg, 0.66 to 0.86 for FedSPU, 0.83 to 1.04 for FedPURIN (LeNet-5, cnn-kapc; densities of 0.005 to
        0.2, 1 to 8 levels). Bits of levels are those of exponentially distributed magnitudes. Errors are
        those of FedAvg.
        """
        share, tail = self.density, math.exp(-_BIN)
        spread = _entropy(share) + share if share < 1 else 1.0
        reached = [tail**level * (1 - tail) for level in range(self.levels - 1)] + [tail ** (self.levels - 1)]
        levels = -sum(one * math.log2(one) for one in reached)
        if self.span == "all":  # measured: 2.1 bits a level with 16 levels
            levels = max(levels, math.log2(self.levels) - 1.7)
        finest = _FINEST_ERROR * share**_ERROR_SLOPE
        coarser = max(0.0, _TERNARY_ERROR**2 - finest**2) * math.exp(1 - self.levels)
        error = math.sqrt(finest**2 + coarser)
        return EncodingCost(
            bytes_per_value=(0.75 * spread + share * levels) / 8,
            encode_ns=200 + 1500 * share,
            decode_ns=200 + 2500 * share,
            held_bytes=8,
            relative_error=error,
            compression_error=min(1.0, 1.15 * error),  # 1.34 times as many rounds with the default settings
            delays=True,
        )

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        reference = np.zeros_like(values) if known.reference is None else known.reference
        with np.errstate(over="ignore"):
            wanted = values if residual is None else np.clip(values + residual, -_LARGEST, _LARGEST)
            change = np.clip(wanted - reference, -_LARGEST, _LARGEST)
            chosen = _largest(change, self.density)
            levels, magnitudes = _quantised(change, chosen, self.levels, self.span)
            sizes = np.array([magnitude(one) for one in magnitudes])
            arrived = reference.copy()
            arrived[chosen] += np.copysign(sizes[levels[chosen]], change[chosen])
            # the level's mean can lead beyond float32 where the entry's own change does not
            lost = ~np.isfinite(arrived)
            arrived[lost], chosen[lost] = reference[lost], False
            new_residual = np.clip(wanted - arrived, -_LARGEST, _LARGEST)
        out = RangeEncoder()
        out.write(_AS_THEY_ARE if known.reference is None else _DIFFERENCES, 1, _FORMS)
        _write_magnitudes(out, magnitudes)
        writer = Writer(out, len(magnitudes))
        for tensor in tensors_of(known, values.size):
            writer.write(tensor, chosen, change < 0, levels)
        return Encoded(out.finish(), new_residual)

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        values, source = known.start(count), RangeDecoder(data)
        form = source.read_even(_FORMS)
        if form != (_AS_THEY_ARE if known.reference is None else _DIFFERENCES):
            raise PacketCorrupt(
                f"values of form {form}: written with another reference model, or by a later version"
            )
        sizes = np.array([magnitude(one) for one in _read_magnitudes(source)])
        reader = Reader(source, sizes.size)
        for tensor in tensors_of(known, count):
            for hits, negative, levels in reader.read(tensor):
                with np.errstate(over="ignore"):
                    values[hits] += np.where(negative, -sizes[levels], sizes[levels])
                if not np.isfinite(values[hits]).all():
                    raise PacketNotFinite("a decoded value is beyond the largest float32")
        source.finish()
        return values


def _entropy(share: float) -> float:
    """Return the entropy of a boolean that is True with probability `share`, in bits."""
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


def _largest(change: FlatArray, density: float) -> NDArray[np.bool_]:
    """Mark the largest entries, a fraction `density`. Ties go to the first entry; zeros are never marked."""
    chosen = np.zeros(change.size, np.bool_)
    size = np.abs(change)
    wanted = min(int(np.count_nonzero(size)), math.ceil(density * change.size))
    if wanted:
        bound = np.partition(size, change.size - wanted)[change.size - wanted]
        chosen = size > bound
        at_bound = np.flatnonzero(size == bound)
        chosen[at_bound[: wanted - int(np.count_nonzero(chosen))]] = True
    return chosen


def _quantised(
    change: FlatArray, chosen: NDArray[np.bool_], num_levels: int, span: Literal["mean", "all"]
) -> tuple[Ints, list[int]]:
    """Return each chosen entry's level, shape (n,), and each level's mean magnitude in eighths of an octave.

    Levels start at the least chosen magnitude. `Sparse.span` decides their width. With `mean`, a level is
    `_BIN` times as wide as the distance from the least to the mean magnitude.
    """
    levels, sizes = np.zeros(change.size, np.uint8), np.abs(change[chosen])
    if not sizes.size:
        return levels, [0]
    above = sizes.astype(np.float64) if span == "mean" else np.sqrt(sizes, dtype=np.float64)
    above -= above.min()
    width = _BIN * (_mean(sizes) - float(sizes.min())) if span == "mean" else above.max() / num_levels
    if width > 0 and num_levels > 1:
        levels[chosen] = np.minimum(above / width, num_levels - 1).astype(np.uint8)
    magnitudes: list[int] = []
    for level in range(int(levels.max()) + 1):
        members = sizes[levels[chosen] == level]
        magnitudes.append(_eighths(members) if members.size else magnitudes[-1])
    return levels, magnitudes


def _write_magnitudes(out: RangeEncoder, magnitudes: list[int]) -> None:
    out.write(len(magnitudes) - 1, 1, MAX_LEVELS)
    out.write(magnitudes[0], 1, MAGNITUDES)
    for before, after in pairwise(magnitudes):
        out.write_number(max(0, after - before), _STRIDE_LENGTHS)


def _read_magnitudes(data: RangeDecoder) -> list[int]:
    num_levels = data.read_even(MAX_LEVELS) + 1
    magnitudes = [data.read_even(MAGNITUDES)]
    while len(magnitudes) < num_levels:
        magnitudes.append(magnitudes[-1] + data.read_number(_STRIDE_LENGTHS))
    if magnitudes[-1] >= MAGNITUDES:
        raise PacketCorrupt("a decoded magnitude is beyond the largest float32")
    return magnitudes


def _scaled_sum(sizes: FlatArray) -> tuple[int, int]:
    """Return the sum of non-negative numbers as a whole number, and its unit as a power of two.

    A sum of whole numbers does not depend on the order in which a machine adds them.
    """
    unit = int(np.frexp(sizes.max())[1]) - 38  # 2^24 such numbers stay below 2^62
    return int(np.ldexp(sizes.astype(np.float64), -unit).astype(np.int64).sum()), unit


def _mean(sizes: FlatArray) -> float:
    total, unit = _scaled_sum(sizes)
    return math.ldexp(total // sizes.size, unit)


def _eighths(sizes: FlatArray) -> int:
    """Return the mean of non-negative numbers, in eighths of an octave above 2^-149."""
    total, unit = _scaled_sum(sizes)
    mean = total // sizes.size
    exponent = mean.bit_length() - 1
    leading = (mean << 16 >> exponent) >> 1
    eighths = 8 * (exponent + unit + SUBNORMAL) + bisect_right(_LOG_STEPS, leading)
    return max(0, min(eighths, MAGNITUDES - 1))
