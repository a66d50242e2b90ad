"""All payloads between this side and one peer, so that a serve loop only passes messages on.

    for item in outbox.post(transfer key, payload, now):      publish(item)
    for item in outbox.handle(reply, now):              publish(item), or note a `Sent`
    for item in outbox.tick(now):                       publish(item); call it at `outbox.wake_at`
    for item in outbox.reconnected(now):                publish(item); after every Connected
    for item in inbox.handle_offer(offer):              publish(item), or store an `Arrived`
    for item in inbox.handle_chunk(data, now):          likewise

Items are handled in the order they come: `Arrived` stands before its `Ack`, so that what is
acknowledged is stored. When storing fails, stop there: the peer offers again.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.wire.incoming_parts import Part
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, TransferKey
from fleetune.protocols.wire.pacing import DEFAULT_CHUNK_BYTES, Window
from fleetune.protocols.wire.sender import Sender
from fleetune.protocols.wire.transfer import (
    TRANSFER_BYTES,
    Chunk,
    Outgoing,
    Payload,
    Receiver,
    Reply,
    objection,
)

MAX_OPEN = 4  # incoming transfers of one peer; an honest peer needs one
MAX_REMEMBERED = 64


@dataclass(frozen=True)
class Sent:
    """A payload left the outbox: delivered, or refused by the peer.

    Attributes:
        transfer_key: what it was for.
        refused: the peer's reason; None: delivered, verified and on the peer's disk.
        num_bytes: the payload's.
        sent_bytes: chunks put on the wire for it, repeats and headers included.
        seconds: from the first offer to the end, disconnections included.
        goodput_bps: payload a second while it flowed; None: not measured.
    """

    transfer_key: TransferKey
    refused: str | None
    num_bytes: int
    sent_bytes: int
    seconds: float
    goodput_bps: float | None


@dataclass(frozen=True)
class Arrived:
    """A payload came in whole. Store it, then `Inbox.settle(arrived.offer.transfer)`.

    Attributes:
        offer: what it is for.
        part: holds it.
        received_bytes: chunks taken from the wire since the last start, repeats and headers included.
        goodput_bps: payload a second while it flowed; None: not measured.
    """

    offer: Offer
    part: Part
    received_bytes: int
    goodput_bps: float | None

    def payload(self) -> bytes:
        """Raises StoreError."""
        return self.part.payload()


class Outbox:
    """Payloads to one peer, one after another; `device` names the device in either direction."""

    def __init__(self, device: str, max_chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._device = device
        self._window = Window(max_chunk_bytes)
        self._queue: deque[Sender] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def wake_at(self) -> float | None:
        """When `tick` has something to do; None: never."""
        return self._queue[0].wake_at if self._queue else None

    @property
    def transfer_keys(self) -> list[TransferKey]:
        """Of what is still to be delivered; the first is on its way."""
        return [sender.offer.transfer_key for sender in self._queue]

    @property
    def progress(self) -> float | None:
        """Of the payload on its way, 0..1; None: there is none."""
        if not self._queue:
            return None
        sender = self._queue[0]
        return sender.acked_bytes / max(1, sender.offer.num_bytes)

    def post(
        self, transfer_key: TransferKey, payload: Payload, now: float, *, ratio: float | None = None
    ) -> list[Outgoing]:
        """Send `payload` after those before it; one that waits already is not sent twice. `ratio`: see
        `Offer`.
        """
        sender = Sender(self._device, transfer_key, payload, ratio=ratio, window=self._window)
        if any(other.offer.transfer == sender.offer.transfer for other in self._queue):
            return []
        self._queue.append(sender)
        return self._start_next(now)

    def drop(self, unwanted: Callable[[TransferKey], bool], now: float) -> list[Outgoing]:
        """Forget the payloads whose transfer key is no longer wanted."""
        self._queue = deque(sender for sender in self._queue if not unwanted(sender.offer.transfer_key))
        return self._start_next(now)

    def handle(self, reply: Reply, now: float) -> list[Outgoing | Sent]:
        """The peer's answer; one to a transfer that is not on its way is ignored."""
        if not self._queue:
            return []
        sender = self._queue[0]
        items: list[Outgoing | Sent] = [*sender.handle(reply, now)]
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


class Inbox:
    """Payloads from one peer.

    Args:
        device: names the device in either direction.
        open_part: the part of an offer, see `part_folder`.
        max_bytes: the longest payload taken.
        have: whether this payload was stored before, perhaps by an earlier process.
        objects: why this transfer key is not wanted; None if it is.
        lacks: why there is no room for a payload that is wanted; None if there is.
    """

    def __init__(
        self,
        device: str,
        open_part: Callable[[Offer], Part],
        *,
        max_bytes: int,
        have: Callable[[Offer], bool] = lambda _: False,
        objects: Callable[[TransferKey], str | None] = lambda _: None,
        lacks: Callable[[Offer], str | None] = lambda _: None,
    ) -> None:
        self._device = device
        self._open_part = open_part
        self._max_bytes = max_bytes
        self._have = have
        self._objects = objects
        self._lacks = lacks
        self._open: OrderedDict[str, Receiver] = OrderedDict()  # the one heard of last stands last
        self._settled: OrderedDict[str, str | None] = OrderedDict()  # with the reason if it was refused

    @property
    def progress(self) -> float | None:
        """Of the payload that is arriving, 0..1; None: there is none."""
        if not self._open:
            return None
        receiver = next(reversed(self._open.values()))
        return receiver.part.size / max(1, receiver.offer.num_bytes)

    def expects(self, packet: bytes) -> bool:
        """Whether a chunk may bring something of a payload that is arriving; only its head is read."""
        receiver = self._open.get(packet[:TRANSFER_BYTES].hex())
        return receiver is not None and not receiver.has(packet)

    @property
    def transfers(self) -> tuple[str, ...]:
        """Those that are arriving."""
        return tuple(self._open)

    @property
    def missing_bytes(self) -> int:
        """Of all payloads that are arriving, what is not here yet."""
        return sum(receiver.offer.num_bytes - receiver.part.size for receiver in self._open.values())

    def handle_offer(self, offer: Offer) -> list[Reply | Arrived]:
        """Raises StoreError."""
        problem = objection(offer, self._device, self._max_bytes) or self._settled.get(offer.transfer)
        if problem is None and (offer.transfer in self._settled or self._have(offer)):
            self.give_up(offer.transfer)
            return [Ack(offer.transfer, offer.num_bytes)]
        problem = problem or self._objects(offer.transfer_key)
        receiver = self._open.get(offer.transfer)
        if problem is None and receiver is None:
            problem = self._lacks(offer)
        if problem is not None:
            return [Refuse(offer.transfer, problem)]
        if receiver is None:
            receiver = self._admit(offer)
        self._open.move_to_end(offer.transfer)
        return self._outcome(receiver, receiver.handle_offer(offer))

    def handle_chunk(self, packet: bytes, now: float) -> list[Reply | Arrived]:
        """Raises PacketTruncated, PacketTooLarge, StoreError, and PacketForeign for a chunk of a transfer
        that is not open: after a restart some may come before the peer has offered again.
        """
        chunk = Chunk.decode(packet)
        if chunk.transfer in self._settled:
            return []  # a late copy
        receiver = self._open.get(chunk.transfer)
        if receiver is None:
            raise PacketForeign(f"chunk of transfer {chunk.transfer}, which is not open")
        self._open.move_to_end(chunk.transfer)
        reply = receiver.handle_chunk(chunk, now)
        return [] if reply is None else self._outcome(receiver, reply)

    def settle(self, transfer: str, refused: str | None = None) -> None:
        """The payload is stored elsewhere, or `refused` for this reason: remove the part, and answer at
        once when it is offered again.
        """
        self.give_up(transfer)
        self._settled[transfer] = refused
        if len(self._settled) > MAX_REMEMBERED:
            self._settled.popitem(last=False)

    def is_settled(self, transfer: str) -> bool:
        return transfer in self._settled

    def forget(self, transfer: str) -> None:
        """What it was stored as is gone: take it when it is offered again."""
        self._settled.pop(transfer, None)

    def refuse_unwanted(self) -> list[Refuse]:
        """Give up what is arriving although nobody waits for it any more."""
        reasons = {
            transfer: self._objects(receiver.offer.transfer_key) for transfer, receiver in self._open.items()
        }
        refusals = [Refuse(transfer, reason) for transfer, reason in reasons.items() if reason is not None]
        for refusal in refusals:
            self.settle(refusal.transfer, refusal.reason)
        return refusals

    def _admit(self, offer: Offer) -> Receiver:
        while len(self._open) >= MAX_OPEN:
            self.give_up(next(iter(self._open)))
        self._open[offer.transfer] = Receiver(offer, self._open_part(offer))
        return self._open[offer.transfer]

    def give_up(self, transfer: str) -> None:
        """Forget what is there of a payload; it may be offered again. Raises StoreError."""
        receiver = self._open.pop(transfer, None)
        if receiver is not None:
            receiver.part.clear()

    def give_up_all(self) -> None:
        """As `give_up`, of every payload that is arriving."""
        for transfer in tuple(self._open):
            self.give_up(transfer)

    def _outcome(self, receiver: Receiver, reply: Reply) -> list[Reply | Arrived]:
        if isinstance(reply, Refuse):
            self.give_up(receiver.offer.transfer)
        if not receiver.complete:
            return [reply]
        arrived = Arrived(receiver.offer, receiver.part, receiver.received_bytes, receiver.goodput_bps)
        return [arrived, reply]
