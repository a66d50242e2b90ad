"""NNCodec (ISO/IEC 15938-17), for comparison where a user has installed it: `pip install nncodec`.

Each tensor of a step is coded by itself with NNCodec's defaults for single tensors (trellis-coded
quantisation, row skipping), tensors of one axis like the others, and all streams are counted.
"""

from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fleetune.protocols.model.spec import FlatArray
from fleetune.tools.bench.trained_differences import Sent


def there() -> bool:
    """Whether NNCodec is installed."""
    try:
        import nncodec.tensor  # noqa: F401
    except ImportError:
        return False
    return True


def compressed(sent: Sent, step: FlatArray, quantisation: int) -> tuple[list[bytes], list[slice]]:
    """The streams of a step at a quantisation parameter (lower: finer), and which entries each is of."""
    from nncodec.tensor import encode

    numbers, starts = np.unique(sent.known.tensors, return_index=True)
    places = [slice(*pair) for pair in zip(starts, [*starts[1:], step.size], strict=True)]
    streams = []
    with TemporaryDirectory() as folder:
        words = {"qp": quantisation, "nonweight_qp": quantisation, "results": folder, "verbose": False}
        for number, place in zip(numbers, places, strict=True):
            rows = sent.known.row_sizes[number]
            tensor = step[place].reshape(-1, rows) if rows > 1 else step[place]
            streams.append(bytes(encode(np.ascontiguousarray(tensor), words)))
    return streams, places


def read(streams: list[bytes], places: list[slice], size: int) -> FlatArray:
    """The step that the streams hold, shape (size,)."""
    from nncodec.tensor import decode

    step = np.zeros(size, np.float32)
    for stream, place in zip(streams, places, strict=True):
        tensor: Any = decode(bytearray(stream))
        step[place] = np.asarray(tensor, np.float32).reshape(-1)
    return step
