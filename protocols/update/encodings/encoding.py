"""What an encoding of values is: float32 numbers to bytes and back, with what both sides hold as a help.

An encoding is pure: no I/O, no clock, no randomness but its key's. It knows neither the model nor who sends;
`protocols.update.patch_values` cuts base and residual to the entries of the patch, and frames the bytes.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import SettingError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.body import Source

SLOWING = 0.52
"""How many times as many rounds more it takes to an accuracy where all of each change waits: 0.47 to 0.57,
whatever leaves it out (docs/ratios.md)."""


@dataclass(frozen=True)
class Known:
    """What both sides know of the n entries that values are written for.

    Attributes:
        base: the values that both sides hold, finite, shape (n,); None: they hold none.
        tensors: the number of each entry's tensor in the model, ascending, shape (n,); empty: all are of one.
        row_sizes: how many entries a row of each tensor of the model has, by its number, a row being what has
            one index on its first axis; empty: not known.
        places: each entry's place in its tensor, shape (n,); None: the tensors are whole.
        spare: `base` is a copy that nobody needs any more: `decode` may make its values there.
    """

    base: FlatArray | None = None
    tensors: NDArray[np.int16] = field(default_factory=lambda: np.zeros(0, np.int16))
    row_sizes: tuple[int, ...] = ()
    places: NDArray[np.int32] | None = None
    spare: bool = False

    def beginnings(self, chunk: slice) -> list[int]:
        """Where in these entries, counted from the chunk's own beginning, further tensors begin."""
        tensors = self.tensors[chunk]
        beginnings: list[int] = (np.flatnonzero(tensors[1:] != tensors[:-1]) + 1).tolist()
        return beginnings


@dataclass(frozen=True)
class Encoded:
    """Values as an encoding wrote them.

    Attributes:
        data: the bytes to send.
        residual: values and earlier residual, less what `decode` gives; None: nothing is to follow, `decode`
            gives all of them, or all of them on average.
    """

    data: bytes
    residual: FlatArray | None = None


@dataclass(frozen=True)
class EncodingCost:
    """What an encoding takes and gives with its settings, for whoever chooses among several.

    All but `held_bytes` was measured on FedAvg's updates of trained models (`benchmarks/encodings.py`);
    a method that sends its largest entries alone has up to 1.6 times the bytes, and more error.

    Attributes:
        bytes_per_value: in a payload.
        encode_ns, decode_ns: of a value, on a core of an x86-64 server, without the payload's compression.
        held_bytes: of each entry of the model, on a device beside what `raw` takes: the residual, as it is
            kept and as it becomes.
        relative_error: of one update, the distance of what is decoded to the values over that of the base;
            what is left out goes along with a later one, or is noise that averages away.
        compression_error: usual norm of the new residual over that of change and old residual; the mean over
            a run's rounds, FedSPU on Fashion-MNIST (docs/ratios.md).
        delays: the residual holds changes that arrive later; else it is rounding noise, which hardly costs a
            round.
    """

    bytes_per_value: float
    encode_ns: float
    decode_ns: float
    held_bytes: float = 0.0
    relative_error: float = 0.0
    compression_error: float = 0.0
    delays: bool = False

    def utility_factor(self, compression_error: float | None = None) -> float:
        """Rounds to an accuracy with whole updates over rounds with this encoding, in (0, 1].

        `compression_error`: as measured; None: the usual one.
        """
        error = self.compression_error if compression_error is None else compression_error
        return 1 / (1 + SLOWING * error) if self.delays else 1.0


class Encoding(Protocol):
    """One way to write float32 values; all arrays have the shape (n,) of the patch's selected entries.

    Its attributes are settings of the side that writes, each with a default; who reads needs none of them.

    Class attributes:
        name: in run.toml, on the wire, and in the registry.
        lossless: `decode` gives the same bits.
        on_average: one update is mostly noise, right in the mean of many, so nothing waits for the next one;
            tasks, of which nobody takes a mean, are written otherwise.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    on_average: ClassVar[bool] = False

    @property
    def cost(self) -> EncodingCost:
        """With these settings, of what a round of training changes in trained weights."""
        ...

    def for_tasks(self) -> "Encoding":
        """What writes tasks. Raises SettingError: this one is not for them."""
        if self.on_average:
            raise SettingError(
                f"{self.name} is for `up` alone, where means are taken: take lowrank or sparse"
            )
        return self

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        """Write the values.

        Args:
            values: finite.
            known: of the same entries.
            residual: what earlier encodings left out of these entries, to be added; None: nothing.
            key: of random draws; the reader does not have it.
        """
        ...

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        """Read a peer's bytes.

        Args:
            data: at most a payload long.
            count: how many values these are, held against the model; what is allocated is bounded by it.
            known: what they were written with.

        Returns:
            Shape (count,), not necessarily finite.

        Raises:
            PacketError: `encode` never makes such bytes for so many values, or not without a base.
        """
        ...

    def decode_from(self, source: Source, length: int, count: int, known: Known) -> FlatArray:
        """Read a peer's bytes as they come, `length` of them; else as `decode`."""
        return self.decode(source.read(length), count, known)

    def size(self, num_values: int) -> int:
        """About how many bytes so many values take in a payload."""
        return int(self.cost.bytes_per_value * num_values)
