"""Stores a model's backbone as a file: the safetensors layout, with tensors in the order of `Backbone`.

Tensors are float32. With int8 weights, each output channel (the first axis) has a float32 scale, and all
other tensors are float32. The spec lists the tensors, so a reader knows every byte of the header before it
reads the file.
"""

import json
import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketCorrupt, PacketForeign, PacketNotFinite, StoreError
from fleetune.protocols.model.spec import Backbone, FrozenTensor, ModelSpec

_ALIGNMENT = 64
_CHECKED_AT_ONCE = 2**20  # entries of a backbone
_LARGEST = 127  # largest int8 used; without -128 both signs have the same range
_BYTES = {"F32": 4, "I8": 1}

Tensors = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Int8Weight:
    """A tensor stored as int8: `numbers` times `scale`, with one scale for each index of the first axis."""

    numbers: NDArray[np.int8]
    scale: NDArray[np.float32]

    @classmethod
    def of(cls, values: NDArray[np.float32]) -> "Int8Weight":
        """Quantise `values`: each channel's largest value becomes 127."""
        rows = values.reshape(len(values), -1)
        scale = (np.abs(rows).max(1) / np.float32(_LARGEST)).astype(np.float32)
        scale[scale == 0] = 1
        numbers = np.clip(np.rint(rows / scale[:, None]), -_LARGEST, _LARGEST).astype(np.int8)
        return cls(numbers.reshape(values.shape), scale)

    @property
    def values(self) -> NDArray[np.float32]:
        """Return the dequantised values, a new array."""
        scale = self.scale.reshape(-1, *[1] * (self.numbers.ndim - 1))
        return np.multiply(self.numbers, scale, dtype=np.float32)


class Int8Tensors(Mapping[str, NDArray[np.float32]]):
    """The tensors of a backbone by name; those stored as int8 are dequantised when they are read.

    Args:
        weights: tensors stored as int8.
        others: all other tensors.
    """

    def __init__(self, weights: Mapping[str, Int8Weight], others: Tensors) -> None:
        self.weights, self._others = weights, others

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        return self.weights[name].values if name in self.weights else self._others[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._others
        yield from self.weights

    def __len__(self) -> int:
        return len(self.weights) + len(self._others)


@dataclass(frozen=True)
class _Entry:
    """One tensor of the file, with its position."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return _BYTES[self.dtype] * math.prod(self.shape)


def backbone_file(backbone: Backbone, tensors: Tensors) -> bytes:
    """Return the file of a backbone with these values; equal values give equal bytes."""
    values = {one.name: np.ascontiguousarray(tensors[one.name], np.float32) for one in backbone.tensors}
    stored: dict[str, NDArray[np.generic]] = dict(values)
    for tensor in backbone.tensors:
        if _is_int8(backbone, tensor):
            weight = Int8Weight.of(values[tensor.name])
            stored |= {tensor.name: weight.numbers, _scale(tensor): weight.scale}
    return b"".join((_head(backbone), *(stored[one.name].tobytes() for one in _entries(backbone))))


def backbone_file_bytes(backbone: Backbone) -> int:
    """Return the size of the file in bytes."""
    return len(_head(backbone)) + _num_bytes(backbone)


def held_bytes(spec: ModelSpec, *, as_stored: bool) -> int:
    """Return the memory of a model's frozen tensors in bytes: as stored, or all as float32."""
    if as_stored and isinstance(spec.backbone, Backbone):
        return _num_bytes(spec.backbone)
    return 4 * sum(tensor.size for tensor in spec.frozen)


def read_backbone(data: bytes | memoryview, backbone: Backbone) -> Tensors:
    """Return the tensors in a backbone's file by name, as views of `data`.

    Int8 weights are computed from these views when they are read.

    Raises:
        PacketForeign: the file belongs to another model.
        PacketCorrupt: the file has another length.
        PacketNotFinite: a tensor holds NaN or infinite values.
    """
    head = _head(backbone)
    if data[: len(head)] != head:
        raise PacketForeign(
            "the backbone's file belongs to another model: its tensors differ from the run's model"
        )
    if len(data) != len(head) + _num_bytes(backbone):
        raise PacketCorrupt(
            f"the backbone's file has {len(data)} bytes; expected {len(head) + _num_bytes(backbone)}"
        )
    floats: dict[str, NDArray[np.float32]] = {}
    numbers: dict[str, NDArray[np.int8]] = {}
    start = len(head)
    for entry in _entries(backbone):
        if entry.dtype == "I8":
            numbers[entry.name] = np.frombuffer(data, np.int8, entry.num_bytes, start).reshape(entry.shape)
        else:
            values = np.frombuffer(data, "<f4", entry.num_bytes // 4, start)
            if not _is_finite(values):
                raise PacketNotFinite(f"tensor {entry.name} of the backbone holds NaN or infinite values")
            floats[entry.name] = values.reshape(entry.shape)
        start += entry.num_bytes
    if not numbers:
        return floats
    weights = {
        one.name: Int8Weight(numbers[one.name], floats.pop(_scale(one)))
        for one in backbone.tensors
        if one.name in numbers
    }
    return Int8Tensors(weights, floats)


def mapped(path: Path, offset: int = 0) -> memoryview | None:
    """Return a file's content from `offset` on, as pages that all processes share; None without such a file.

    Raises:
        StoreError: the file cannot be read.
    """
    try:
        with path.open("rb") as file:  # copy on write, because torch needs a writable buffer
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[offset:]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as problem:  # ValueError: the file is empty
        raise StoreError(f"cannot read {path}: {problem}") from None


def _is_int8(backbone: Backbone, tensor: FrozenTensor) -> bool:
    return backbone.weights == "int8" and len(tensor.shape) > 1


def _scale(tensor: FrozenTensor) -> str:
    return f"{tensor.name}:scale"


def _entries(backbone: Backbone) -> list[_Entry]:
    """Return the tensors in the file's order: float32 first, so that all are aligned."""
    int8 = [one for one in backbone.tensors if _is_int8(backbone, one)]
    others = (one for one in backbone.tensors if not _is_int8(backbone, one))
    floats = [_Entry(one.name, "F32", one.shape) for one in others]
    scales = [_Entry(_scale(one), "F32", one.shape[:1]) for one in int8]
    return [*floats, *scales, *(_Entry(one.name, "I8", one.shape) for one in int8)]


def _num_bytes(backbone: Backbone) -> int:
    return sum(entry.num_bytes for entry in _entries(backbone))


def _head(backbone: Backbone) -> bytes:
    described, start = {}, 0
    for entry in _entries(backbone):
        stop = start + entry.num_bytes
        described[entry.name] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _is_finite(values: NDArray[np.float32]) -> bool:
    """True if all values are finite; the check needs no mask of the tensor's size."""
    parts = (values[start : start + _CHECKED_AT_ONCE] for start in range(0, values.size, _CHECKED_AT_ONCE))
    return all(np.isfinite(part).all() for part in parts)
