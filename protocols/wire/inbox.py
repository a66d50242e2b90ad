"""Payloads from one peer, on their way in; see `protocols.wire.peer_link` for how it is used."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from fleetune.protocols.errors import PacketForeign
from fleetune.protocols.wire.incoming_parts import Part
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, TransferKey
from fleetune.protocols.wire.transfer import TRANSFER_BYTES, Chunk, Receipt, Receiver, objection

MAX_OPEN = 4  # incoming transfers of one peer; an honest peer needs one
MAX_REMEMBERED = 64
T = TypeVar("T")


@dataclass(frozen=True)
class Arrived:
    """A payload came in whole. Store it and `accept` it, or `refuse` it: nothing was answered yet.

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
        self._unopened: OrderedDict[str, None] = OrderedDict()  # offered, and nothing of it asked for

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

    def handle_offer(self, offer: Offer) -> Receipt | Arrived | None:
        """What to answer, or that all of it is here by now; None: nothing just now, it is offered again.

        Raises:
            StoreError: what is there of it cannot be read.
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
        """What to answer, or that all of it is here by now; None: nothing.

        Raises:
            PacketTruncated, PacketTooLarge: it is no chunk, or none of what was offered.
            PacketForeign: it belongs to a transfer that is not open: after a restart some may come before
                the peer has offered again.
            StoreError: the disk is full.
        """
        chunk = Chunk.decode(packet)
        if chunk.transfer in self._settled:
            return None  # a late copy
        receiver = self._open.get(chunk.transfer)
        if receiver is None and chunk.transfer in self._unopened:
            return None  # it came behind its offer
        if receiver is None:
            raise PacketForeign(f"chunk of transfer {chunk.transfer}, which is not open")
        self._open.move_to_end(chunk.transfer)
        receipt = receiver.handle_chunk(chunk, now)
        return None if receipt is None else self._outcome(receiver, receipt)

    def accept(self, arrived: Arrived) -> Ack:
        """It is stored elsewhere: what to answer, now and when it is offered again."""
        self.settle(arrived.offer.transfer)
        return Ack(arrived.offer.transfer, arrived.offer.num_bytes)

    def refuse(self, arrived: Arrived, reason: str) -> Refuse:
        """It is not taken: what to answer, now and when it is offered again."""
        self.settle(arrived.offer.transfer, reason)
        return Refuse(arrived.offer.transfer, reason)

    def settle(self, transfer: str, refused: str | None = None) -> None:
        """The payload is stored elsewhere, or `refused` for this reason: remove the part, and answer at
        once when it is offered again.
        """
        self.give_up(transfer)
        _remember(self._settled, transfer, refused)

    def note_unopened(self, transfer: str) -> None:
        """It was offered, and nothing of it asked for: what comes behind its offer is no surprise."""
        _remember(self._unopened, transfer, None)

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

    def _outcome(self, receiver: Receiver, receipt: Receipt) -> Receipt | Arrived:
        if isinstance(receipt, Refuse):
            self.give_up(receiver.offer.transfer)
        if not receiver.complete:
            return receipt
        return Arrived(receiver.offer, receiver.part, receiver.received_bytes, receiver.goodput_bps)


def _remember(transfers: OrderedDict[str, T], transfer: str, what: T) -> None:
    """The latest `MAX_REMEMBERED`."""
    transfers[transfer] = what
    if len(transfers) > MAX_REMEMBERED:
        transfers.popitem(last=False)
