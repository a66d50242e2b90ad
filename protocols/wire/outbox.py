"""The outbox: sends payloads to one peer, one after another; `protocols.wire.peer_link` describes its use."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.pacing import DEFAULT_CHUNK_BYTES, Window
from fleetune.protocols.wire.sender import Sender
from fleetune.protocols.wire.transfer import Outgoing, Payload, Receipt


@dataclass(frozen=True)
class Sent:
    """Event: a payload was delivered, or the peer refused it.

    Attributes:
        transfer_key: key of the payload.
        refused: the peer's reason; None if the payload is delivered, verified and on the peer's disk.
        num_bytes: size of the payload.
        sent_bytes: bytes of sent chunks, including repeats and headers.
        seconds: from the first offer to the end, including disconnections.
        goodput_bps: payload bits per second while it flowed; None if not measured.
    """

    transfer_key: TransferKey
    refused: str | None
    num_bytes: int
    sent_bytes: int
    seconds: float
    goodput_bps: float | None


class Outbox:
    """Sends payloads to one peer, one after another. `device` is the device's name in either direction."""

    def __init__(self, device: str, max_chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._device = device
        self._window = Window(max_chunk_bytes)
        self._queue: deque[Sender] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def wake_at(self) -> float | None:
        """Time of the next call of `tick`; None for never."""
        return self._queue[0].wake_at if self._queue else None

    @property
    def keys(self) -> list[TransferKey]:
        """Keys of the undelivered payloads; the first one is being sent."""
        return [sender.offer.transfer_key for sender in self._queue]

    @property
    def progress(self) -> float | None:
        """Delivered fraction of the payload that is being sent, 0..1; None if there is none."""
        if not self._queue:
            return None
        sender = self._queue[0]
        return sender.acked_bytes / max(1, sender.offer.num_bytes)

    def post(
        self,
        key: TransferKey,
        payload: Payload,
        now: float,
        *,
        ratio: float | None = None,
        perhaps_there: bool = False,
    ) -> list[Outgoing]:
        """Queue `payload`, unless the same payload already waits; return what to send now.

        `ratio`: see `Offer`. `perhaps_there`: True if the payload may have been offered before, so that the
        peer may have a part of it.
        """
        window = self._window
        sender = Sender(self._device, key, payload, ratio=ratio, window=window, perhaps_there=perhaps_there)
        if any(other.offer.transfer == sender.offer.transfer for other in self._queue):
            return []
        self._queue.append(sender)
        return self._start_next(now)

    def drop(self, unwanted: Callable[[TransferKey], bool], now: float) -> list[Outgoing]:
        """Drop the payloads whose transfer key is no longer wanted."""
        self._queue = deque(sender for sender in self._queue if not unwanted(sender.offer.transfer_key))
        return self._start_next(now)

    def handle(self, receipt: Receipt, now: float) -> list[Outgoing | Sent]:
        """Handle the peer's receipt; ignore it if its transfer is not being sent."""
        if not self._queue:
            return []
        sender = self._queue[0]
        items: list[Outgoing | Sent] = [*sender.handle(receipt, now)]
        if not sender.ended:
            return items
        self._queue.popleft()
        return [_summary(sender, now), *self._start_next(now)]

    def tick(self, now: float) -> list[Outgoing]:
        return self._queue[0].tick(now) if self._queue else []

    def reconnected(self, now: float) -> list[Outgoing]:
        self._window.reset()
        return self._queue[0].reconnected(now) if self._queue else []

    def _start_next(self, now: float) -> list[Outgoing]:
        if self._queue and self._queue[0].started_at is None:
            return self._queue[0].start(now)
        return []


def _summary(sender: Sender, now: float) -> Sent:
    offer = sender.offer
    started_at = now if sender.started_at is None else sender.started_at
    return Sent(
        offer.transfer_key,
        sender.refused,
        offer.num_bytes,
        sender.sent_bytes,
        now - started_at,
        sender.goodput_bps,
    )
