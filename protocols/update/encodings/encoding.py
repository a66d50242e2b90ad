"""Interface of encodings: float32 numbers to bytes and back, with the help of values that both sides hold.

An encoding is pure: it has no I/O and no clock, and its only randomness comes from its key. It knows neither
the model nor the sender. `protocols.update.patch_values` restricts reference and residual to the entries of
the patch, and frames the bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import SettingError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.body import Source

SLOWING = 0.52
"""By which fraction the rounds to an accuracy grow if every change arrives one update late.

0.52 means 1.52 times as many rounds. Measured: 0.47 to 0.57, whatever causes the delay (docs/ratios.md).
"""


@dataclass(frozen=True)
class Known:
    """Facts that both sides know about the n entries of a patch.

    Attributes:
        reference: values that both sides hold, finite, shape (n,); None if they hold none.
        tensors: number of each entry's tensor in the model, ascending, shape (n,); empty if all entries
            belong to one tensor.
        row_sizes: row size of each tensor of the model, by its number; empty if unknown. A row is all entries
            with one index on the first axis.
        places: place of each entry in its tensor, shape (n,); None if the tensors are complete.
        spare: True if `decode` may overwrite `reference`, because the caller does not need this copy.
    """

    reference: FlatArray | None = None
    tensors: NDArray[np.int16] = field(default_factory=lambda: np.zeros(0, np.int16))
    row_sizes: tuple[int, ...] = ()
    places: NDArray[np.int32] | None = None
    spare: bool = False

    def start(self, count: int) -> FlatArray:
        """Return the values to which decoded changes are added, shape (count,): the reference, or zeros."""
        if self.reference is None:
            return np.zeros(count, np.float32)
        return self.reference if self.spare else self.reference.copy()

    def parts(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Yield start, stop and row size (0 if unknown) of each tensor in a patch of `count` entries."""
        start = 0
        while start < count:
            number = self.tensors[start] if self.tensors.size else 0
            stop = int(np.searchsorted(self.tensors, number, "right")) if self.tensors.size else count
            yield start, stop, self.row_sizes[number] if self.row_sizes else 0
            start = stop

    def beginnings(self, chunk: slice) -> list[int]:
        """Return where further tensors begin in a chunk, counted from the start of the chunk."""
        tensors = self.tensors[chunk]
        beginnings: list[int] = (np.flatnonzero(tensors[1:] != tensors[:-1]) + 1).tolist()
        return beginnings


@dataclass(frozen=True)
class Encoded:
    """The bytes of encoded values, and the compression error that they leave.

    Attributes:
        data: bytes to send.
        residual: values plus earlier residual, minus the decoded values. None if `decode` gives the values
            exactly, or right on average, so that no later update must correct them.
    """

    data: bytes
    residual: FlatArray | None = None


@dataclass(frozen=True)
class EncodingCost:
    """Predicted cost and error of an encoding with its settings, for a choice among several.

    All but `held_bytes` was measured on FedAvg's updates of trained models (`benchmarks/encodings.py`). For a
    method that sends only its largest entries, bytes are up to 1.6 times as many, and errors are larger.

    Attributes:
        bytes_per_value: bytes for each value in a payload.
        encode_ns, decode_ns: nanoseconds for each value on a core of an x86-64 server, without the payload's
            compression.
        held_bytes: memory on a device for each entry of the model, in addition to that of `raw`: the old and
            the new residual.
        relative_error: distance from decoded values to true values, divided by the distance from reference to
            true values. The error is sent with a later update, or is noise that averages out.
        compression_error: usual norm of the new residual, divided by the norm of change plus old residual.
            Mean over the rounds of FedSPU on Fashion-MNIST (docs/ratios.md).
        delays: True if the residual holds changes that arrive later; False if the residual is rounding noise,
            which hardly slows learning.
    """

    bytes_per_value: float
    encode_ns: float
    decode_ns: float
    held_bytes: float = 0.0
    relative_error: float = 0.0
    compression_error: float = 0.0
    delays: bool = False

    def utility_factor(self, compression_error: float | None = None) -> float:
        """Return rounds to an accuracy with whole updates, divided by rounds with this encoding, in (0, 1].

        `compression_error` is a measured value; None for the usual one.
        """
        error = self.compression_error if compression_error is None else compression_error
        return 1 / (1 + SLOWING * error) if self.delays else 1.0


class Encoding(Protocol):
    """Base class of encodings. All arrays have the shape (n,) of the patch's selected entries.

    Instance attributes are settings of the writing side, each with a default. The reader needs none of them.

    Class attributes:
        name: name in run.toml, on the wire, and in the registry.
        lossless: True if `decode` gives the same bits.
        on_average: True if one update is mostly noise and the mean of many is right, so that there is no
            residual. Tasks use another encoding, because no mean is taken over tasks.
        leak: what its bytes reveal of a device's data besides the values, as a reason to refuse [privacy];
            None if nothing. A class states this itself.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    on_average: ClassVar[bool] = False
    leak: ClassVar[str | None] = "it does not state what its bytes reveal (`leak`)"

    @property
    def cost(self) -> EncodingCost:
        """Return the predicted cost with these settings, for the changes of trained weights in a round."""
        ...

    def for_tasks(self) -> "Encoding":
        """Return the encoding for tasks. Raises SettingError if this encoding cannot be used for tasks."""
        if self.on_average:
            raise SettingError(
                f"{self.name} works for `up` only, because the mean over updates removes its noise;"
                " use lowrank or sparse"
            )
        return self

    def encode(self, values: FlatArray, known: Known, residual: FlatArray | None, key: Key) -> Encoded:
        """Encode the values.

        Args:
            values: values of the entries, finite.
            known: facts that both sides know about the same entries.
            residual: compression error of earlier encodings, to be added; None if there is none.
            key: key of random draws. The reader does not have it.
        """
        ...

    def decode(self, data: bytes, count: int, known: Known) -> FlatArray:
        """Decode a peer's bytes.

        Args:
            data: bytes of the values, at most a payload long.
            count: number of values, already checked against the model. It bounds the memory that is
                allocated.
            known: facts with which the values were written.

        Returns:
            The values, shape (count,), not necessarily finite.

        Raises:
            PacketError: `encode` cannot have written these bytes for `count` values, or not without a
                reference.
        """
        ...

    def decode_from(self, source: Source, length: int, count: int, known: Known) -> FlatArray:
        """Decode `length` bytes from a source while they arrive; otherwise like `decode`."""
        return self.decode(source.read(length), count, known)

    def size(self, num_values: int) -> int:
        """Return the approximate number of bytes of `num_values` values in a payload."""
        return int(self.cost.bytes_per_value * num_values)
