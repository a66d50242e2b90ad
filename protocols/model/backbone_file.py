"""A model's backbone as a file: the safetensors layout, float32, the tensors in the order of `Backbone`.

The spec says which tensors there are, so a reader knows every byte of the head before it sees the file, and
trusts none of them.
"""

import json
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, PacketForeign, PacketNotFinite, StoreError
from fleetune.protocols.model.spec import Backbone

_ALIGNMENT = 64
_CHECKED_AT_ONCE = 2**20  # entries

Tensors = Mapping[str, NDArray[np.float32]]


def backbone_file(backbone: Backbone, tensors: Tensors) -> bytes:
    """The file of a backbone with these values; equal ones give equal bytes."""
    values = (np.ascontiguousarray(tensors[one.name], np.float32).tobytes() for one in backbone.tensors)
    return b"".join((_head(backbone), *values))


def backbone_file_bytes(backbone: Backbone) -> int:
    """How long the file is."""
    return len(_head(backbone)) + backbone.num_bytes


def read_backbone(data: bytes | memoryview, backbone: Backbone) -> Tensors:
    """The tensors in a backbone's file by name: views of `data`.

    Raises:
        PacketForeign: it is of another model.
        PacketCorrupt: it has another length.
        PacketNotFinite: a tensor holds NaN or infinite values.
    """
    head = _head(backbone)
    if data[: len(head)] != head:
        raise PacketForeign("the backbone's file does not hold the tensors that the run's model has")
    if len(data) != len(head) + backbone.num_bytes:
        raise PacketCorrupt(
            f"the backbone's file has {len(data)} bytes, not {len(head) + backbone.num_bytes}"
        )
    found, start = {}, len(head)
    for tensor in backbone.tensors:
        values = np.frombuffer(data, "<f4", tensor.size, start)
        if not _is_finite(values):
            raise PacketNotFinite(f"tensor {tensor.name} of the backbone holds NaN or infinite values")
        found[tensor.name] = values.reshape(tensor.shape)
        start += 4 * tensor.size
    return found


def mapped(path: Path, offset: int = 0) -> memoryview | None:
    """A file's content from `offset` on, as pages that all processes share; None: there is no such file.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        with path.open(
            "rb"
        ) as file:  # what is written to it stays in this process; torch asks that it can be
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[offset:]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:  # an empty file is a ValueError
        raise StoreError(f"cannot read {path}: {problem}") from None


def _head(backbone: Backbone) -> bytes:
    described, start = {}, 0
    for tensor in backbone.tensors:
        stop = start + 4 * tensor.size
        described[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _is_finite(values: NDArray[np.float32]) -> bool:
    """Without a mask of the whole tensor beside it."""
    parts = (values[start : start + _CHECKED_AT_ONCE] for start in range(0, values.size, _CHECKED_AT_ONCE))
    return all(np.isfinite(part).all() for part in parts)
