"""Stores the replies of the open round, until its updates are aggregated."""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from fleetune.coordinator.store.method_state import stored_pieces
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.update import codec
from fleetune.protocols.wire.payloads import Reply

_MOST_BYTES = 2**28  # of updates at hand, two arrays of the model's size each


@dataclass
class OpenReplies:
    """Keeps replies in the run's store, or in memory where an interrupted round is not continued (a
    simulation).

    Attributes:
        store: of the run.
        method: of the run.
        in_memory: keep them as they were read, while there is room.
    """

    store: RunStore
    method: Method[Any, Any, Any, Any]
    in_memory: bool = False
    _read: dict[DeviceId, Reply[Any]] = field(default_factory=dict, init=False)

    def add(self, reply: Reply[Any], data: bytes | None = None) -> None:
        """Store a reply; inside `store.step()`.

        Args:
            reply: as it was read, and moved since.
            data: as it came, where that can be read without anything else and nothing was moved.
        """
        self._read.pop(reply.device, None)
        if self.in_memory and (1 + len(self._read)) * 8 * self.method.spec.size <= _MOST_BYTES:
            self._read[reply.device] = reply
            return
        pieces = stored_pieces(reply, self.method.spec) if data is None else [data]
        self.store.add_reply(reply.device, pieces)

    def read(self, device: DeviceId) -> Reply[Any]:
        """Return a device's reply, which the caller may change.

        Raises:
            StoreError: there is no such reply.
        """
        if device in self._read:
            return deepcopy(self._read[device])
        kind: Any = Reply[self.method.update_type]  # type: ignore[name-defined]
        with self.store.reply(device) as stored:
            is_plain = codec.is_plain(stored.read(codec.HEADER_BYTES))
            stored.seek(0)
            found: Reply[Any] = (
                codec.decode_from(stored, kind, self.method.spec)
                if is_plain
                else codec.decode(stored.read(), kind, self.method.spec)
            )
        return found

    def drop(self) -> None:
        """Drop all replies, because the round is over. Inside `store.step()`."""
        self._read.clear()
        self.store.drop_replies()
