"""One payload from one side to the other: over any loss, repetition, reconnection and restart.

Everything here is messages in, messages out: no socket, no clock (`now` is in seconds, from any start).
All timers are the sender's (sender.py). The dialogue:

    sender                          receiver
    Offer                ->                     who I am, how long, which digest; again when unanswered
    chunk, chunk         ->                     a task's or an update's first window, behind its first offer
                         <-         Resume      from this offset on (what I have is on disk)
    chunk, chunk, ...    ->
                         <-         Ack         of each chunk; of the last one when all is verified
                         <-         Resume      once for each gap, and from 0 when the digest differs

MQTT keeps the order of what it delivers, so the receiver takes the next byte only and whatever was
lost is sent again from there on.
"""

import hashlib
import re
import struct
from dataclasses import dataclass
from mmap import mmap
from typing import Self

import msgspec

from fleetune.protocols.errors import PacketTooLarge, PacketTruncated
from fleetune.protocols.wire.incoming_parts import DIGEST_BYTES, Part
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.pacing import MAX_CHUNK_BYTES

MAX_MISMATCHES = 3

TRANSFER_BYTES = 16

_HEAD = struct.Struct(f"<{TRANSFER_BYTES}sQ")
_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Chunk:
    """A stretch of a payload: 16 bytes transfer id, 8 bytes offset little endian, data."""

    transfer: str
    offset: int
    data: bytes | memoryview

    @property
    def num_bytes(self) -> int:
        """Encoded length."""
        return _HEAD.size + len(self.data)

    def encode(self) -> bytes:
        return b"".join((_HEAD.pack(bytes.fromhex(self.transfer), self.offset), self.data))

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        """Raises PacketTruncated or PacketTooLarge."""
        if len(packet) <= _HEAD.size:
            raise PacketTruncated(f"chunk of {len(packet)} bytes; the header alone has {_HEAD.size}")
        if len(packet) > _HEAD.size + MAX_CHUNK_BYTES:
            raise PacketTooLarge(f"chunk of {len(packet)} bytes; at most {_HEAD.size + MAX_CHUNK_BYTES}")
        transfer, offset = _HEAD.unpack_from(packet)
        return cls(transfer.hex(), offset, memoryview(packet)[_HEAD.size :])


Payload = bytes | bytearray | memoryview | mmap
Outgoing = Offer | Chunk
Receipt = Resume | Ack | Refuse


def digest_of(payload: Payload) -> str:
    """BLAKE2b-128, 32 hex digits."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).hexdigest()


def transfer_id(key: TransferKey, device: str, digest: str) -> str:
    """32 hex digits; `device` is the device's name in either direction."""
    return digest_of(msgspec.json.encode((key, device, digest)))


def objection(offer: Offer, device: str, max_bytes: int) -> str | None:
    """Why an offer cannot be taken, found before anything is allocated; None if it can.

    The id is recomputed: it names a file, and one id must never stand for two payloads.
    """
    if not 0 <= offer.num_bytes <= max_bytes:
        return f"payload of {offer.num_bytes} bytes; 0 to {max_bytes} are taken here"
    if not _HEX.fullmatch(offer.digest):
        return "the digest is not 32 hex digits"
    if offer.transfer != transfer_id(offer.transfer_key, device, offer.digest):
        return "the transfer id does not belong to this transfer key, device and digest"
    return None


class Receiver:
    """The receiving half of one transfer.

    Attributes:
        offer: what is offered.
        part: what is there of it; one that an earlier process left is gone on with.
        complete: all of it is there, verified and flushed to disk.
        received_bytes: chunks taken from the wire, repeats and headers included.
    """

    def __init__(self, offer: Offer, part: Part) -> None:
        self.offer = offer
        self.part = part
        self.complete = False
        self.received_bytes = 0
        self._mismatches = 0
        self._asked_for: int | None = None  # offset of the last Resume
        self._flow: tuple[float, float, int] | None = None  # first and last chunk's time, bytes between

    @property
    def goodput_bps(self) -> float | None:
        """New payload between its first and its last chunk over the time between, bits a second; None
        before the second chunk.
        """
        if self._flow is None or self._flow[1] <= self._flow[0]:
            return None
        return 8 * self._flow[2] / (self._flow[1] - self._flow[0])

    def has(self, packet: bytes) -> bool:
        """Whether a chunk brings nothing that is not here; only its head is read."""
        if len(packet) <= _HEAD.size:
            return True
        return int(_HEAD.unpack_from(packet)[1]) + len(packet) - _HEAD.size <= self.part.size

    def handle_offer(self, offer: Offer) -> Receipt:
        """Raises StoreError."""
        if offer != self.offer:
            return Refuse(offer.transfer, "this transfer was offered with other properties before")
        if self.complete:
            return self._ack()
        if self.part.size > self.offer.num_bytes:
            self.part.clear()
        return self._verify() if self.part.size == self.offer.num_bytes else self._resume()

    def handle_chunk(self, chunk: Chunk, now: float) -> Receipt | None:
        """Take the chunk if it brings the next byte.

        Raises:
            PacketTooLarge: it reaches beyond the end that was offered.
            StoreError: the disk is full; nothing is lost, the sender offers again later.
        """
        end = chunk.offset + len(chunk.data)
        if end > self.offer.num_bytes:
            raise PacketTooLarge(f"chunk up to byte {end} of a payload of {self.offer.num_bytes}")
        self.received_bytes += chunk.num_bytes
        have = self.part.size
        if end <= have:
            return self._answer()
        if chunk.offset > have:
            return self._resume() if self._asked_for != have else None
        self.part.append(chunk.data[have - chunk.offset :])
        self._measure(end - have, now)
        return self._answer()

    def _measure(self, num_bytes: int, now: float) -> None:
        if self._flow is None:
            self._flow = (now, now, 0)
        else:
            first, _, total = self._flow
            self._flow = (first, now, total + num_bytes)

    def _answer(self) -> Receipt:
        whole = self.part.size == self.offer.num_bytes
        return self._verify() if whole and not self.complete else self._ack()

    def _verify(self) -> Receipt:
        if self.part.digest() == self.offer.digest:
            self.part.seal()
            self.complete = True
            return self._ack()
        self.part.clear()
        self._mismatches += 1
        if self._mismatches == MAX_MISMATCHES:
            return Refuse(self.offer.transfer, f"the digest was wrong {MAX_MISMATCHES} times")
        return self._resume()

    def _ack(self) -> Ack:
        return Ack(self.offer.transfer, self.part.size)

    def _resume(self) -> Resume:
        self._asked_for = self.part.size
        return Resume(self.offer.transfer, self.part.size)
