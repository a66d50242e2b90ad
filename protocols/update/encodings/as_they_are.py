"""Values that go as they are, where an encoding that tells differences by noise has none to tell."""

import numpy as np

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update.encodings.chunks import wanted_of
from fleetune.protocols.update.encodings.encoding import Encoded

AS_THEY_ARE = 0  # the first byte


def whole(values: FlatArray, residual: FlatArray | None) -> Encoded:
    """The values behind the byte that says so: there is no base, or noise could lead beyond float32."""
    plain = wanted_of(values, residual, slice(None)).astype("<f4").tobytes()
    return Encoded(bytes([AS_THEY_ARE]) + plain)


def read_whole(data: bytes, count: int) -> FlatArray:
    """Shape (count,). Raises PacketCorrupt: these are not so many."""
    check_length(data, 1 + 4 * count)
    return np.frombuffer(data, "<f4", offset=1).astype(np.float32)


def check_length(data: bytes, length: int) -> None:
    """Raises PacketCorrupt: it has another."""
    if len(data) != length:
        raise PacketCorrupt(f"encoded values of {len(data)} bytes; {length} are due")
