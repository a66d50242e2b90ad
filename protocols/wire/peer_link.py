"""The link between this side and one peer: payloads both ways, as packets to publish and events.

The link has no socket and no clock. Packets and times go in (`now` is in seconds, from any start); packets
and events come out.

    for item in link.post(key, payload, now):           queue a payload for the peer
    for item in link.hear(channel, data, now):          data that arrived on the peer's topics
    for item in link.tick(now):                         at `link.wake_at`
    for item in link.reconnected(now):                  after every `Connected`

Handle the items in their order:

    Packet      publish it on the peer's topic of that channel
    Sent        our payload is on the peer's disk, or was refused
    Arrived     the peer's payload is complete: store it, then publish `link.accept(arrived)`, or
                `link.refuse(arrived, reason)`; until then the peer repeats its offer
    Answered    the packet before this one answers an offer of the peer
    a message   any other message, which the link does not handle
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from fleetune.protocols.wire import messages
from fleetune.protocols.wire.inbox import Arrived, Inbox
from fleetune.protocols.wire.messages import Ack, Message, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.outbox import Outbox, Sent
from fleetune.protocols.wire.pacing import DEFAULT_CHUNK_BYTES
from fleetune.protocols.wire.topics import Channel
from fleetune.protocols.wire.transfer import Chunk, Outgoing, Payload, Receipt

Role = Literal["coordinator", "device"]


@dataclass(frozen=True)
class Packet:
    """A packet to publish.

    Attributes:
        channel: last part of the topic, below the device's name; see `protocols.wire.topics`.
        content: a control message, or a chunk of a payload.
        compact: True to encode a control message in the compact form.
    """

    channel: Channel
    content: Message | Chunk
    compact: bool = False

    @property
    def data(self) -> bytes:
        """The encoded packet. It is encoded on access, because a window holds many chunks."""
        content = self.content
        if isinstance(content, Chunk):
            return content.encode()
        return messages.encode(content, compact=self.compact)

    @property
    def is_chunk(self) -> bool:
        """True if the packet is a chunk, which the peer acknowledges."""
        return isinstance(self.content, Chunk)


@dataclass(frozen=True)
class Answered:
    """Event: an offer of the peer was answered.

    Attributes:
        offer: the offer.
        receipt: the answer. `Resume`: the payload is arriving; `Ack`: it is already stored; `Refuse`: it is
            rejected; None for no answer, so that the peer repeats its offer.
    """

    offer: Offer
    receipt: Receipt | None


Item = Packet | Sent | Arrived | Answered | Message


class PeerLink:
    """One side's end of the dialogue with one peer.

    Args:
        device: name of the device, in either direction.
        role: role of this side.
        inbox: inbox of this side; it decides which payloads are wanted.
        max_chunk_bytes: size of the largest chunk to send.

    Attributes:
        outbox, inbox: payloads to and from the peer.
        compact: True if control messages to the peer use the compact form. A device sets it when it is ready
            in a run that asks for it. It always answers the offer of an enrolment in JSON. A coordinator
            answers in the form of the device's last message.
    """

    def __init__(
        self, device: str, role: Role, inbox: Inbox, *, max_chunk_bytes: int = DEFAULT_CHUNK_BYTES
    ) -> None:
        self.outbox = Outbox(device, max_chunk_bytes)
        self.inbox = inbox
        self.compact = False
        self._control: Channel = "up" if role == "device" else "down"
        self._bulk: Channel = "update" if role == "device" else "task"
        self._incoming: Channel = "task" if role == "device" else "update"
        self._read: Callable[[bytes], Message] = (
            messages.read_to_device if role == "device" else messages.read_from_device
        )

    @property
    def wake_at(self) -> float | None:
        """Time of the next call of `tick`; None for never."""
        return self.outbox.wake_at

    def packet(self, content: Message | Chunk) -> Packet:
        """Return a packet on the channel where the peer expects this content."""
        if isinstance(content, Chunk):
            return Packet(self._bulk, content)
        return Packet(self._control, content, self.compact)

    def post(
        self,
        key: TransferKey,
        payload: Payload,
        now: float,
        *,
        ratio: float | None = None,
        perhaps_there: bool = False,
    ) -> list[Item]:
        """Queue `payload` for the peer, see `Outbox.post`."""
        return self._packed(self.outbox.post(key, payload, now, ratio=ratio, perhaps_there=perhaps_there))

    def drop(self, unwanted: Callable[[TransferKey], bool], now: float) -> list[Item]:
        """Drop the payloads whose transfer key is no longer wanted."""
        return self._packed(self.outbox.drop(unwanted, now))

    def hear(self, channel: str, data: bytes, now: float) -> list[Item]:
        """Handle data that arrived on one of the peer's channels.

        Raises:
            PacketError: the data cannot be decoded.
            StoreError: an arriving payload cannot be stored.
        """
        return self.take_chunk(data, now) if channel == self._incoming else self.handle(self._read(data), now)

    def handle(self, message: Message, now: float) -> list[Item]:
        """Handle a control message; return it unchanged if it concerns no payload. Raises StoreError."""
        match message:
            case Offer():
                return self._consider(message)
            case Resume() | Ack() | Refuse():
                return self._packed(self.outbox.handle(message, now))
            case _:
                return [message]

    def take_chunk(self, data: bytes, now: float) -> list[Item]:
        """Handle a chunk of a payload. Raises as `Inbox.handle_chunk` does."""
        outcome = self.inbox.handle_chunk(data, now)
        if outcome is None:
            return []
        return [outcome] if isinstance(outcome, Arrived) else [self.packet(outcome)]

    def accept(self, arrived: Arrived) -> Packet:
        """Record that a payload is stored; return the packet that tells the peer to stop offering it."""
        return self.packet(self.inbox.accept(arrived))

    def refuse(self, arrived: Arrived, reason: str) -> Packet:
        """Reject a payload for good; return the packet with the reason."""
        return self.packet(self.inbox.refuse(arrived, reason))

    def refuse_unwanted(self) -> list[Item]:
        """Reject arriving payloads that are no longer wanted, and return the answers."""
        return self._packed(self.inbox.refuse_unwanted())

    def tick(self, now: float) -> list[Item]:
        """Send again what was not answered in time."""
        return self._packed(self.outbox.tick(now))

    def reconnected(self, now: float) -> list[Item]:
        """Resume after a new connection or a restart of the peer, which loses the packets in flight."""
        return self._packed(self.outbox.reconnected(now))

    def _consider(self, offer: Offer) -> list[Item]:
        if offer.transfer_key.kind == "enrolment":
            self.compact = False
        outcome = self.inbox.handle_offer(offer)
        if not isinstance(outcome, Resume | Arrived):
            self.inbox.note_unopened(offer.transfer)
        if outcome is None:
            return [Answered(offer, None)]
        if isinstance(outcome, Arrived):
            return [outcome]
        return [self.packet(outcome), Answered(offer, outcome)]

    def _packed(self, items: Iterable[Outgoing | Refuse | Sent]) -> list[Item]:
        return [item if isinstance(item, Sent) else self.packet(item) for item in items]
