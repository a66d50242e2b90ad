"""Encoding `int8`: differences to the reference as integers from -127 to 127 (`blockwise`)."""

from dataclasses import dataclass

import numpy as np

from fleetune.protocols.update.encodings.blockwise import Blockwise, Integers
from fleetune.protocols.update.encodings.chunks import Bytes
from fleetune.protocols.update.encodings.encoding import EncodingCost


@dataclass(frozen=True)
class Int8(Blockwise):
    """Writes one byte for each integer, which zstd's entropy coder halves; relative error about 0.9 %."""

    floor: float = 0.03

    name = "int8"
    leak = None
    cost = EncodingCost(4 * 0.13, encode_ns=15, decode_ns=5, held_bytes=8, relative_error=0.009)
    largest = 127

    def packed(self, integers: Integers) -> Bytes:
        return integers.view(np.uint8)

    def unpacked(self, data: Bytes, count: int) -> Integers:
        return data.view(np.int8)

    def num_bytes(self, count: int) -> int:
        return count
