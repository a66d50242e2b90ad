"""The inbox: receives payloads from one peer; `protocols.wire.peer_link` describes its use."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.wire.incoming_parts import Part
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, TransferKey
from fleetune.protocols.wire.transfer import TRANSFER_BYTES, Chunk, Receipt, Receiver, objection

MAX_OPEN = 4  # open incoming transfers of one peer; a correct peer needs one
MAX_REMEMBERED = 64
T = TypeVar("T")


@dataclass(frozen=True)
class Arrived:
    """A complete payload that is not answered yet: store it and call `accept`, or call `refuse`.

    Attributes:
        offer: the offer of the payload.
        part: the storage that holds the payload.
        received_bytes: bytes of received chunks since the last start, including repeats and headers.
        goodput_bps: payload bits per second while it flowed; None if not measured.
    """

    offer: Offer
    part: Part
    received_bytes: int
    goodput_bps: float | None

    def payload(self) -> bytes:
        """Return the bytes of the payload. Raises StoreError."""
        return self.part.payload()


class Inbox:
    """Receives payloads from one peer.

    Args:
        device: name of the device, in either direction.
        open_part: function that opens the storage for an offer, see `part_folder`.
        max_bytes: size of the largest accepted payload.
        have: function that returns True if this payload is already stored, perhaps by an earlier process.
        objects: function that returns the reason why a transfer key is unwanted; None if it is wanted.
        lacks: function that returns the reason why there is no space for a payload; None if there is.
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
        # ordered by the time of the last packet, newest last
        self._open: OrderedDict[str, Receiver] = OrderedDict()
        # values are rejection reasons; None for accepted payloads
        self._settled: OrderedDict[str, str | None] = OrderedDict()
        # transfers that were offered, but of which no chunk was requested
        self._unopened: OrderedDict[str, None] = OrderedDict()

    @property
    def progress(self) -> float | None:
        """Received fraction of the arriving payload, 0..1; None if none is arriving."""
        if not self._open:
            return None
        receiver = next(reversed(self._open.values()))
        return receiver.part.size / max(1, receiver.offer.num_bytes)

    def expects(self, packet: bytes) -> bool:
        """True if a chunk may add to an arriving payload; only the chunk's header is read."""
        receiver = self._open.get(packet[:TRANSFER_BYTES].hex())
        return receiver is not None and not receiver.has(packet)

    @property
    def transfers(self) -> tuple[str, ...]:
        """Ids of the transfers that are arriving."""
        return tuple(self._open)

    @property
    def missing_bytes(self) -> int:
        """Bytes of all arriving payloads that have yet to arrive."""
        return sum(receiver.offer.num_bytes - receiver.part.size for receiver in self._open.values())

    def handle_offer(self, offer: Offer) -> Receipt | Arrived | None:
        """Handle an offer: return the answer, or `Arrived` if the payload is complete.

        Returns:
            None if there is no answer now; the peer repeats its offer.

        Raises:
            StoreError: the stored part of the payload cannot be read.
        """
        problem = objection(offer, self._device, self._max_bytes) or self._settled.get(offer.transfer)
        if problem is None and (offer.transfer in self._settled or self._have(offer)):
            self.give_up(offer.transfer)
            return Ack(offer.transfer, offer.num_bytes)
        problem = problem or self._objects(offer.transfer_key)
        receiver = self._open.get(offer.transfer)
        if problem is None and receiver is None:
            problem = self._lacks(offer)
        if problem is not None:
            return Refuse(offer.transfer, problem)
        if receiver is None:
            receiver = self._admit(offer)
        self._open.move_to_end(offer.transfer)
        return self._outcome(receiver, receiver.handle_offer(offer))

    def handle_chunk(self, packet: bytes, now: float) -> Receipt | Arrived | None:
        """Handle a chunk: return the answer, or `Arrived` if the payload is complete, or None.

        Raises:
            PacketTruncated, PacketTooLarge: the packet is too short for a chunk, or does not fit the offer.
            PacketForeign: the chunk's transfer is not open. After a restart, chunks may arrive before the
                peer has repeated its offer.
            StoreError: the disk is full.
        """
        chunk = Chunk.decode(packet)
        if chunk.transfer in self._settled:
            return None  # a late copy
        receiver = self._open.get(chunk.transfer)
        if receiver is None and chunk.transfer in self._unopened:
            return None  # the peer sent it right after its offer
        if receiver is None:
            raise PacketForeign(f"a chunk belongs to transfer {chunk.transfer}, which is not open")
        self._open.move_to_end(chunk.transfer)
        receipt = receiver.handle_chunk(chunk, now)
        return None if receipt is None else self._outcome(receiver, receipt)

    def accept(self, arrived: Arrived) -> Ack:
        """Record that the payload is stored; return the answer, which is repeated for later offers."""
        self.settle(arrived.offer.transfer)
        return Ack(arrived.offer.transfer, arrived.offer.num_bytes)

    def refuse(self, arrived: Arrived, reason: str) -> Refuse:
        """Record that the payload is rejected; return the answer, which is repeated for later offers."""
        self.settle(arrived.offer.transfer, reason)
        return Refuse(arrived.offer.transfer, reason)

    def settle(self, transfer: str, refused: str | None = None) -> None:
        """Close a transfer: remove its part, and answer later offers at once.

        Args:
            transfer: id of the transfer.
            refused: the rejection reason; None if the payload is stored elsewhere.
        """
        self.give_up(transfer)
        _remember(self._settled, transfer, refused)

    def note_unopened(self, transfer: str) -> None:
        """Record an offer of which no chunk was requested, so that early chunks of it raise no error."""
        _remember(self._unopened, transfer, None)

    def is_settled(self, transfer: str) -> bool:
        return transfer in self._settled

    def forget(self, transfer: str) -> None:
        """Accept this payload again when it is offered, because its stored copy no longer exists."""
        self._settled.pop(transfer, None)

    def refuse_unwanted(self) -> list[Refuse]:
        """Reject arriving payloads that are no longer wanted, and return the answers."""
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
        """Drop the received part of a payload; the peer may offer it again. Raises StoreError."""
        receiver = self._open.pop(transfer, None)
        if receiver is not None:
            receiver.part.clear()

    def give_up_all(self) -> None:
        """Drop the received parts of all arriving payloads, as `give_up` does."""
        for transfer in tuple(self._open):
            self.give_up(transfer)

    def _outcome(self, receiver: Receiver, receipt: Receipt) -> Receipt | Arrived:
        if isinstance(receipt, Refuse):
            self.give_up(receiver.offer.transfer)
        if not receiver.complete:
            return receipt
        return Arrived(receiver.offer, receiver.part, receiver.received_bytes, receiver.goodput_bps)


def _remember(transfers: OrderedDict[str, T], transfer: str, what: T) -> None:
    """Add an entry, and delete all but the latest `MAX_REMEMBERED`."""
    transfers[transfer] = what
    if len(transfers) > MAX_REMEMBERED:
        transfers.popitem(last=False)
