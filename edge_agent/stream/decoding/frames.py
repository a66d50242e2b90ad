"""What the agent and its decoding process send each other: MessagePack after its length, plain values only.

The process has read hostile files, so that the agent believes nothing that it sends: no pickles, bounded
lengths, known dtypes.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.log_mel import LogMel
from fleetune.edge_agent.stream.sample import MAX_SAMPLE_BYTES

MAX_FRAME_BYTES = MAX_SAMPLE_BYTES + 2**20
LENGTH_BYTES = 4
FileKind = Literal["image", "sound", "npz", "parquet"]
_Text = Annotated[str, Meta(max_length=2**22)]


class DecodeRequest(Struct, frozen=True, array_like=True):
    """Read this file; `Columns`, `Cells` and `Block`s follow, then `Done`, `Refused` or `PackageMissing`.

    Attributes:
        kind: of the file.
        path: of it.
        max_bytes: that its content may take.
        sounds: how a sound becomes features.
    """

    kind: FileKind
    path: str
    max_bytes: int
    sounds: LogMel


class ArrayData(Struct, frozen=True, array_like=True):
    """An array."""

    dtype: Literal["|u1", "<f4", "<f8", "<i8"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(max_length=32)]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> "ArrayData":
        """An array of one of these dtypes."""
        return cls(array.dtype.str, array.shape, array.tobytes())  # type: ignore[arg-type]

    @property
    def array(self) -> NDArray[Any]:
        """Raises ValueError: there are more or fewer bytes than its shape says."""
        dtype = np.dtype(self.dtype)
        if math.prod(self.shape) * dtype.itemsize != len(self.data):
            raise ValueError("an array's bytes do not fit its shape")
        return np.frombuffer(self.data, dtype).reshape(self.shape)


class Columns(Struct, frozen=True, array_like=True, tag="columns"):
    """Names of a table's columns; its `Cells` follow."""

    names: list[_Text]


class Cells(Struct, frozen=True, array_like=True, tag="cells"):
    """Rows of a table, as texts."""

    rows: list[list[_Text]]


class Block(Struct, frozen=True, array_like=True, tag="block"):
    """Inputs, perhaps with labels and names, as many of each.

    Attributes:
        x: shape (n, ...).
        y: shape (n, ...); None: there are none.
        names: None: there are none.
    """

    x: ArrayData
    y: ArrayData | None = None
    names: list[str | int] | None = None


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """The file has been read in whole."""


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """Nothing more comes of the file; `words` is the line that says why."""

    words: Annotated[str, Meta(max_length=2000)]


class PackageMissing(Struct, frozen=True, array_like=True, tag="lacking"):
    """What reads such files is not installed; `words` is the line that says how to."""

    words: Annotated[str, Meta(max_length=2000)]


Frame = Columns | Cells | Block | Done | Refused | PackageMissing
_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_requests = msgspec.msgpack.Decoder(DecodeRequest)


def encode(frame: Frame | DecodeRequest) -> bytes:
    """A frame or a request with its length before it. Raises ValueError: it is too long to be sent."""
    data = _encoder.encode(frame)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError("too much for one frame")
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_frame(data: bytes) -> Frame:
    """A frame without its length. Raises ValueError: it is none."""
    frame: Frame = _frames.decode(data)
    if isinstance(frame, Block):
        counts = {len(one.array) if one.shape else -1 for one in (frame.x, frame.y) if one is not None}
        if frame.names is not None:
            counts.add(len(frame.names))
        if len(counts) > 1 or -1 in counts:
            raise ValueError("a block's rows are not as many")
    return frame


def read_request(data: bytes) -> DecodeRequest:
    """A request without its length. Raises msgspec.MsgspecError."""
    return _requests.decode(data)
