"""The values of patches, written and read by an encoding: [name of the encoding, [how many], data].

What `raw` wrote is framed as any other float32 array, as it always was. An encoding sees only the entries
that a patch selects: base and residual are cut to these here.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec import UNSET, UnsetType

from fleetune.protocols.errors import PacketCorrupt, PacketNotFinite
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import encodings
from fleetune.protocols.update.arrays import FLOAT32, Array, Arrays, WireArray, parts_of
from fleetune.protocols.update.base import Base
from fleetune.protocols.update.encodings.encoding import Encoding, Known
from fleetune.protocols.update.patch import Patch, patches_in


@dataclass
class Written:
    """What was written of late, for patches that several peers are sent alike and hold alike.

    Attributes:
        most: of the latest are remembered.
    """

    most: int = 4
    _latest: OrderedDict[bytes, WireArray] = field(default_factory=OrderedDict, init=False)

    def found(self, digest: bytes, write: Callable[[], WireArray]) -> WireArray:
        """What was written under this digest, or is now."""
        if digest not in self._latest:
            self._latest[digest] = write()
        self._latest.move_to_end(digest)
        while len(self._latest) > self.most:
            self._latest.popitem(last=False)
        return self._latest[digest]


@dataclass
class PatchWriter:
    """Writes the values of one payload's patches.

    Attributes:
        encoding: the one that writes all of them.
        spec: the model.
        key: of random draws; each patch has a child of it.
        base: what both sides hold; None: nothing. A patch that has an entry beyond it travels whole: the
            entry's value is no small difference to anything.
        residual: what earlier payloads left out, shape (spec.size,); None: nothing.
        written: remembers what was written, of writers without a residual; None: nothing is.
        left_out: the residual for the next payload, a new array; None: nothing. Of patches that overlap, the
            last one's stands.
    """

    encoding: Encoding
    spec: ModelSpec
    key: Key
    base: Base | None = None
    residual: FlatArray | None = None
    written: Written | None = None
    left_out: FlatArray | None = field(default=None, init=False)
    _written: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.left_out = None if self.residual is None else self.residual.copy()

    @property
    def base_digest(self) -> str | UnsetType:
        """Of what it writes with; UNSET: it has no base."""
        return UNSET if self.base is None else self.base.digest

    def write(self, patch: Patch) -> WireArray:
        """The values of the payload's next patch, framed."""
        mask, key = patch.selection.mask(self.spec), self.key.child(self._written)
        self._written += 1
        if self.written is None:
            return self._write(patch, mask, key)
        return self.written.found(self._digest(patch, mask, key), lambda: self._write(patch, mask, key))

    def _write(self, patch: Patch, mask: MaskArray, key: Key) -> WireArray:
        residual = None if self.residual is None else self.residual[mask]
        encoding = self.encoding
        beyond = self.base is not None and not encoding.lossless and not self.base.held[mask].all()
        if beyond or not patch.values.size:
            encoding = encodings.find(encodings.RAW)
        encoded = encoding.encode(patch.values, _known(self.spec, self.base, mask), residual, key)
        if encoded.residual is not None and self.left_out is None and self.written is None:
            self.left_out = np.zeros(self.spec.size, np.float32)
        if self.left_out is not None:
            self.left_out[mask] = 0 if encoded.residual is None else encoded.residual
        name = FLOAT32 if encoding.name == encodings.RAW else encoding.name
        return name, [patch.values.size], encoded.data

    def _digest(self, patch: Patch, mask: MaskArray, key: Key) -> bytes:
        """Of all that decides what is written."""
        found = hashlib.blake2b(
            f"{self.encoding.name} {vars(self.encoding)} {self.base_digest} {key}".encode(), digest_size=16
        )
        found.update(np.packbits(mask).data)
        found.update(np.ascontiguousarray(patch.values).data)
        return found.digest()


@dataclass
class PatchReader:
    """Reads the arrays of one payload, and the values of its patches once the patch around them is known.

    Attributes:
        spec: the model; None: not known, and what an encoding wrote cannot be read.
        arrays: reads what no encoding wrote, and counts everything.
    """

    spec: ModelSpec | None
    arrays: Arrays
    _held: dict[int, tuple[Array, WireArray]] = field(default_factory=dict, init=False)

    def read(self, obj: Any) -> Array:
        """An array, or an empty one that stands for encoded values until `fill`.

        Raises:
            PacketCorrupt, PacketTooLarge, PacketNotFinite.
        """
        name, shape, _ = parts = parts_of(obj)
        if name not in encodings.REGISTRY:
            return self.arrays.read(parts)
        if len(shape) != 1:
            raise PacketCorrupt(f"values in encoding {name} of shape {tuple(shape)}; a patch has one axis")
        self.arrays.take(shape[0], 4 * shape[0])
        stand_in = np.empty(0, np.float32)
        self._held[id(stand_in)] = stand_in, parts
        return stand_in

    def fill(self, message: object, base: Base | None = None) -> None:
        """Decode the values of the patches in `message`, and hold every patch against the model.

        Args:
            message: as it was read.
            base: what both sides hold; None: nothing.

        Raises:
            PacketCorrupt, PacketNotFinite, or another PacketError of the encoding.
        """
        if self.spec is not None:
            for patch in patches_in(message):
                self._fill(patch, self.spec, base)
                patch.check(self.spec)
        if self._held:
            raise PacketCorrupt("encoded values that are not those of a patch of a known model")

    def _fill(self, patch: Patch, spec: ModelSpec, base: Base | None) -> None:
        if id(patch.values) not in self._held:
            return
        _, (name, (count,), data) = self._held.pop(id(patch.values))
        mask = patch.selection.mask(spec)
        if count != np.count_nonzero(mask):
            raise PacketCorrupt(f"patch with {count} values for {np.count_nonzero(mask)} selected entries")
        values = encodings.find(name).decode(data, count, _known(spec, base, mask))
        if self.arrays.finite and not np.isfinite(values).all():
            raise PacketNotFinite("patch holds NaN or infinite values")
        object.__setattr__(patch, "values", values)  # it has just been made, nobody has seen it yet


def _known(spec: ModelSpec, base: Base | None, mask: MaskArray) -> Known:
    sizes = [tensor.size for tensor in spec.tensors]
    rows = tuple(
        tensor.size // tensor.shape[0] if tensor.shape and tensor.size else 1 for tensor in spec.tensors
    )
    tensors = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)
    values = None if base is None else base.values
    if mask.all():  # views are enough
        return Known(values, tensors, rows)
    places = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    return Known(None if values is None else values[mask], tensors[mask], rows, places[mask])
