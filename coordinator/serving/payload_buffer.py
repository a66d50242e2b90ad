"""Buffers for incoming payloads: in memory for small payloads, in a file for long ones.

Each complete reply is stored in the run's store before it is acknowledged. So a file for each small update
would be wasted work. After a crash the device sends its payload again.
"""

from collections.abc import Callable

from fleetune.protocols.wire.incoming_parts import Part, PartFile, PartMemory
from fleetune.protocols.wire.messages import Offer

SMALL_BYTES = 64 * 1024
BUDGET_BYTES = 64 * 1024 * 1024


class MemoryBudget:
    """The memory that all small incoming payloads of a fleet may use together."""

    def __init__(self, num_bytes: int = BUDGET_BYTES) -> None:
        self.left_bytes = num_bytes


class PayloadBuffer:
    """A `Part` in memory that moves to `file` when the memory budget is used up."""

    def __init__(self, file: PartFile, room: MemoryBudget) -> None:
        self._file = file
        self._room = room
        self._memory = PartMemory()

    @property
    def _held(self) -> PartFile | PartMemory:
        return self._file if self._file.size else self._memory

    @property
    def size(self) -> int:
        return self._held.size

    def append(self, data: bytes | memoryview) -> None:
        if not self._file.size and len(data) <= self._room.left_bytes:
            self._room.left_bytes -= len(data)
            self._memory.append(data)
            return
        if self._memory.size:
            self._file.append(self._memory.payload() + bytes(data))
            self._empty()
        else:
            self._file.append(data)

    def clear(self) -> None:
        self._empty()
        if self._file.size:
            self._file.clear()

    def _empty(self) -> None:
        self._room.left_bytes += self._memory.size
        self._memory.clear()

    def digest(self) -> str:
        return self._held.digest()

    def seal(self) -> None:
        self._held.seal()

    def payload(self) -> bytes:
        return self._held.payload()


def buffered_parts(files: Callable[[Offer], PartFile], room: MemoryBudget) -> Callable[[Offer], Part]:
    """Wrap `files`, so that small payloads are buffered in memory instead of in files.

    A long payload takes minutes over a slow uplink. It stays in a file, so that a restart loses no part of
    it.
    """
    return lambda offer: PayloadBuffer(files(offer), room) if offer.num_bytes <= SMALL_BYTES else files(offer)
