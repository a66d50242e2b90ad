"""Encoding `lowrank`: changes of each layer as a few outer products; the remainder waits for a later round.

A round of local training changes a weight matrix by few outer products (`products.py`). PowerSGD (Vogels
et al. 2019, arXiv:1905.13727) sends a fixed number of them as float32, with error feedback.

Differs from the paper:

- Each device sends its own products, as many as are worth their bytes.
- Both factors are rounded to one step width for the whole patch, a multiple of the mean change. So every
  layer and product gets the bits that its size deserves (reverse water-filling).
- Integers are entropy-coded with a prediction from their product, row and column.
- If only some entries of a matrix are sent (by a mask), products are fitted to these entries.

Entries outside matrices, and the remainder that products do not cover, are rounded one by one. Bytes:
docs/wire.md, `lowrank`.
"""

import math
from dataclasses import dataclass

import numpy as np

from fleetune.protocols.errors import PacketCorrupt, PacketNotFinite, SettingError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.chunks import chunks, difference, part_of, wanted_of
from fleetune.protocols.update.encodings.encoding import Encoded, Encoding, EncodingCost, Known
from fleetune.protocols.update.encodings.lowrank_grids import tensors_of
from fleetune.protocols.update.encodings.lowrank_tensors import Parts, TensorReader, TensorWriter
from fleetune.protocols.update.entropy.octaves import MAGNITUDES, magnitude, nearest
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder

_AS_THEY_ARE, _DIFFERENCES, _FORMS = 0, 1, 8  # forms from 2 on are reserved for later versions
# bounds of the root mean square from which the step width follows
_MOST_OF_OWN, _LEAST_OF_WANTED = 3.0, 1 / 8
_MOST_STEPS = 1e6  # keeps squares and their sums within float32


@dataclass(frozen=True)
class LowRank(Encoding):
    """Writes outer products and entries, both in whole steps.

    Attributes:
        step: step width in multiples of the root mean square of all changes, above 0. Values of 3 to 5 pay
            off.
    """

    step: float = 4.0

    name = "lowrank"
    leak = None
    lossless = False

    def __post_init__(self) -> None:
        if not 0 < self.step < math.inf:
            raise SettingError(f"encoding lowrank: step = {self.step} must be above 0")

    @property
    def cost(self) -> EncodingCost:
        """Return the predicted cost, measured on the matrices of LeNet-5.

        The matrices of cnn-kapc take less than half the bytes, in a fifth of the time. Scattered entries
        (SRP-pFed, FedPURIN) take 1.2 to 4.5 times the bytes and have up to twice the error.
        """
        error = min(1.0, 0.088 * self.step**0.72)
        return EncodingCost(
            bytes_per_value=min(4.0, 0.022 * self.step**-0.65),
            encode_ns=150 + 60 / self.step,
            decode_ns=100 + 550 / self.step,
            held_bytes=8,
            relative_error=error,
            # 1.10, 1.17 and 1.34 times as many rounds at steps of 1, 2 and 4
            compression_error=min(1.0, 2.5 * error),
            delays=True,
        )

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        data, arrived = _written(values, residual, known, self._width(values, residual, known.reference))
        # a step would lead beyond float32: leave the whole change in the residual
        if not np.isfinite(arrived).all():
            data, arrived = _written(values, residual, known, None)
        new_residual = arrived
        for chunk in chunks(values.size):
            new_residual[chunk] = difference(wanted_of(values, residual, chunk), arrived[chunk])
        return Encoded(data, new_residual)

    def _width(
        self, values: FlatArray, residual: FlatArray | None, reference: FlatArray | None
    ) -> int | None:
        """Return the step width in eighths of an octave; None if nothing changed.

        The width follows the wanted change, including the residual, so that a round with small changes gets
        no finer steps. The width is bounded: if it grew with the residual without limit, the residual would
        grow with it.
        """
        own = wanted = 0.0
        for chunk in chunks(values.size):
            before = part_of(reference, chunk)
            own += _square(difference(values[chunk], before))
            if residual is not None:
                wanted += _square(difference(wanted_of(values, residual, chunk), before))
        wanted = own if residual is None else wanted
        usual = min(math.sqrt(wanted), _MOST_OF_OWN * math.sqrt(own))
        width = self.step * max(usual, _LEAST_OF_WANTED * math.sqrt(wanted)) / math.sqrt(values.size or 1)
        return nearest(width) if width > 0 else None

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        values, source = known.start(count), RangeDecoder(data)
        form = source.read_even(_FORMS)
        if form != _form(known):
            raise PacketCorrupt(
                f"values of form {form}: written with another reference model, or by a later version"
            )
        width = source.read_even(MAGNITUDES)
        reader = TensorReader(source)
        with np.errstate(over="ignore", invalid="ignore"):
            for tensor in tensors_of(known, count):
                _add(values, reader.read(tensor), width)
                if not np.isfinite(values[tensor.start : tensor.stop]).all():
                    raise PacketNotFinite("a decoded value is beyond the largest float32")
        source.finish()
        return values


def _square(numbers: FlatArray) -> float:
    return float(np.square(numbers, dtype=np.float64).sum())


def _form(known: Known) -> int:
    return _AS_THEY_ARE if known.reference is None else _DIFFERENCES


def _written(
    values: FlatArray, residual: FlatArray | None, known: Known, width: int | None
) -> tuple[bytes, FlatArray]:
    """Return the bytes for steps of this width, and the decoded values. With width None, no change is
    written.
    """
    out = RangeEncoder()
    arrived = np.zeros_like(values) if known.reference is None else known.reference.copy()
    out.write(_form(known), 1, _FORMS)
    out.write(width or 0, 1, MAGNITUDES)
    writer = TensorWriter(out)
    for tensor in tensors_of(known, values.size):
        steps = np.zeros(tensor.size, np.float32)
        for chunk in chunks(0 if width is None else tensor.size):
            here = slice(tensor.start + chunk.start, tensor.start + chunk.stop)
            change = difference(wanted_of(values, residual, here), part_of(known.reference, here))
            steps[chunk] = _in_steps(change, width or 0)
        with np.errstate(over="ignore", invalid="ignore"):
            _add(arrived, writer.write(tensor, steps), width or 0)
    writer.finish()
    return out.finish(), arrived


def _in_steps(change: FlatArray, width: int) -> FlatArray:
    """Return changes in steps, clipped to a factor's largest number; the excess stays in the residual."""
    steps = change.astype(np.float64)
    steps /= float(magnitude(width))
    return np.clip(steps, -_MOST_STEPS, _MOST_STEPS, out=steps).astype(np.float32)


def _add(values: FlatArray, parts: Parts, width: int) -> None:
    """Add changes in steps to `values`, in place. Each float64 product is rounded to float32 once."""
    factor = float(magnitude(width))
    for part, steps in parts:
        values[part] += (steps * factor).astype(np.float32)
