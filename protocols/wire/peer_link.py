"""What passes between this side and one peer: payloads both ways, as packets to publish and events.

No socket, no clock: packets and times in (`now` is in seconds, from any start), packets and events out.

    for item in link.post(key, payload, now):           a payload for the peer, after those before it
    for item in link.hear(channel, data, now):          what came on the peer's topics
    for item in link.tick(now):                         at `link.wake_at`
    for item in link.reconnected(now):                  after every `Connected`

Items are handled in the order they come:

    Packet      publish it on the peer's topic of that channel
    Sent        a payload of ours is on the peer's disk, or was refused
    Arrived     a payload of the peer's is here in whole: keep it, then publish `link.accept(arrived)`, or
                `link.refuse(arrived, reason)`; until then the peer offers it again
    Answered    an offer of the peer's was answered by the packet before this
    a message   of any other kind: not the link's affair
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
    """Something to publish.

    Attributes:
        channel: below the device's name, see `protocols.wire.topics`.
        content: a control message, or a stretch of a payload.
        compact: a control message goes in the compact form.
    """

    channel: Channel
    content: Message | Chunk
    compact: bool = False

    @property
    def data(self) -> bytes:
        """Encoded; made when it is asked for, because a window of chunks is long."""
        content = self.content
        if isinstance(content, Chunk):
            return content.encode()
        return messages.encode(content, compact=self.compact)

    @property
    def is_chunk(self) -> bool:
        """Whether the peer acknowledges it."""
        return isinstance(self.content, Chunk)


@dataclass(frozen=True)
class Answered:
    """An offer of the peer's.

    Attributes:
        offer: what was offered.
        receipt: what was answered. `Resume`: it is arriving; `Ack`: it was here already; `Refuse`: it is not
            taken; None: nothing, it is offered again.
    """

    offer: Offer
    receipt: Receipt | None


Item = Packet | Sent | Arrived | Answered | Message


class PeerLink:
    """One side of the dialogue with one peer.

    Args:
        device: names the device in either direction.
        role: who speaks here.
        inbox: of this side; it decides what is wanted.
        max_chunk_bytes: of what is sent.

    Attributes:
        outbox, inbox: payloads to and from the peer.
        compact: whether control messages go to it in the compact form. A device sets it when it is ready in a
            run that asks for it, and answers an offer of an enrolment in JSON. A coordinator answers in the
            form of the device's last message.
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
        """When `tick` has something to do; None: never."""
        return self.outbox.wake_at

    def packet(self, content: Message | Chunk) -> Packet:
        """On the channel where the peer looks for it."""
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
        """Send `payload` after those before it, see `Outbox.post`."""
        return self._packed(self.outbox.post(key, payload, now, ratio=ratio, perhaps_there=perhaps_there))

    def drop(self, unwanted: Callable[[TransferKey], bool], now: float) -> list[Item]:
        """Forget the payloads whose transfer key is no longer wanted."""
        return self._packed(self.outbox.drop(unwanted, now))

    def hear(self, channel: str, data: bytes, now: float) -> list[Item]:
        """Read what came on one of the peer's channels.

        Raises:
            PacketError: it makes no sense.
            StoreError: what arrives cannot be kept.
        """
        return self.take_chunk(data, now) if channel == self._incoming else self.handle(self._read(data), now)

    def handle(self, message: Message, now: float) -> list[Item]:
        """A control message; one that is of no payload comes back as it is. Raises StoreError."""
        match message:
            case Offer():
                return self._consider(message)
            case Resume() | Ack() | Refuse():
                return self._packed(self.outbox.handle(message, now))
            case _:
                return [message]

    def take_chunk(self, data: bytes, now: float) -> list[Item]:
        """A stretch of a payload. Raises as `Inbox.handle_chunk` does."""
        outcome = self.inbox.handle_chunk(data, now)
        if outcome is None:
            return []
        return [outcome] if isinstance(outcome, Arrived) else [self.packet(outcome)]

    def accept(self, arrived: Arrived) -> Packet:
        """It is kept: the peer may forget it."""
        return self.packet(self.inbox.accept(arrived))

    def refuse(self, arrived: Arrived, reason: str) -> Packet:
        """It is not taken, now or later."""
        return self.packet(self.inbox.refuse(arrived, reason))

    def refuse_unwanted(self) -> list[Item]:
        """Give up what is arriving although nobody waits for it any more."""
        return self._packed(self.inbox.refuse_unwanted())

    def tick(self, now: float) -> list[Item]:
        """Ask again for what was not answered in time."""
        return self._packed(self.outbox.tick(now))

    def reconnected(self, now: float) -> list[Item]:
        """The connection is a new one, or the peer's process: what was on its way is lost."""
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
