"""Messages between the agent and its decoder process: MessagePack, each after its length.

The decoder process reads hostile files, so the agent does not trust its frames. Frames have plain values,
bounded lengths and known dtypes, and no pickles.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from fleetune.edge_agent.stream.sample import MAX_SAMPLE_BYTES

MAX_FRAME_BYTES = MAX_SAMPLE_BYTES + 2**20
LENGTH_BYTES = 4
FileKind = Literal["image", "npz"]


class DecodeRequest(Struct, frozen=True, array_like=True):
    """A request to decode a file.

    The answer is `Block`s, and at the end `Done` or `Refused`.

    Attributes:
        kind: kind of the file.
        path: absolute path of the file.
        max_bytes: largest content of the file, in bytes.
    """

    kind: FileKind
    path: str
    max_bytes: int


class ArrayData(Struct, frozen=True, array_like=True):
    """An array in a frame, as dtype, shape and bytes."""

    dtype: Literal["|u1", "<f4", "<f8", "<i8"]
    shape: Annotated[tuple[Annotated[int, Meta(ge=0, le=2**31)], ...], Meta(max_length=32)]
    data: bytes

    @classmethod
    def of(cls, array: NDArray[Any]) -> "ArrayData":
        """Convert an array of one of these dtypes."""
        return cls(array.dtype.str, array.shape, array.tobytes())  # type: ignore[arg-type]

    @property
    def array(self) -> NDArray[Any]:
        """Return the array. Raises ValueError if the number of bytes does not match the shape."""
        dtype = np.dtype(self.dtype)
        if math.prod(self.shape) * dtype.itemsize != len(self.data):
            raise ValueError("an array's bytes do not match its shape")
        return np.frombuffer(self.data, dtype).reshape(self.shape)


class Block(Struct, frozen=True, array_like=True, tag="block"):
    """A block of samples: as many inputs as labels and names, if there are labels and names.

    Attributes:
        x: inputs, shape (n, ...).
        y: labels, shape (n, ...); None if there are none.
        names: names of the samples; None if there are none.
    """

    x: ArrayData
    y: ArrayData | None = None
    names: list[str | int] | None = None


class Done(Struct, frozen=True, array_like=True, tag="done"):
    """The last frame of a file that was read completely."""


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """The last frame of a file that cannot be read further; `words` gives the reason."""

    words: Annotated[str, Meta(max_length=2000)]


Frame = Block | Done | Refused
_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_requests = msgspec.msgpack.Decoder(DecodeRequest)


def encode(frame: Frame | DecodeRequest) -> bytes:
    """Return a frame or a request, encoded after its length. Raises ValueError if it is too long."""
    data = _encoder.encode(frame)
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError("a frame is too long")
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_frame(data: bytes) -> Frame:
    """Decode a frame from its bytes without the length. Raises ValueError if it is invalid."""
    frame: Frame = _frames.decode(data)
    if isinstance(frame, Block):
        counts = {len(one.array) if one.shape else -1 for one in (frame.x, frame.y) if one is not None}
        if frame.names is not None:
            counts.add(len(frame.names))
        if len(counts) > 1 or -1 in counts:
            raise ValueError("a block's inputs, labels and names have different numbers of rows")
    return frame


def read_request(data: bytes) -> DecodeRequest:
    """Decode a request from its bytes without the length. Raises msgspec.MsgspecError."""
    return _requests.decode(data)
