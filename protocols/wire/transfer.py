"""The transfer of one payload, which survives loss, repetition, reconnection and restart.

All code here turns messages into messages. It has no socket and no clock (`now` is in seconds, from any
start). Only the sender has timers (sender.py). The dialogue:

    sender                          receiver
    Offer                ->                     id, size and digest; repeated until answered
    chunk, chunk         ->                     first window of a task or update, sent with its first offer
                         <-         Resume      send from this offset on (all before it is on disk)
    chunk, chunk, ...    ->
                         <-         Ack         for each chunk; for the last one once all is verified
                         <-         Resume      once for each gap, and from 0 if the digest differs

MQTT keeps the order of the messages that it delivers. So the receiver accepts only the next byte. After a
loss, the sender repeats everything from the lost byte on.
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
    """A piece of a payload: 16 bytes transfer id, 8 bytes offset little endian, data."""

    transfer: str
    offset: int
    data: bytes | memoryview

    @property
    def num_bytes(self) -> int:
        """Encoded length in bytes."""
        return _HEAD.size + len(self.data)

    def encode(self) -> bytes:
        return b"".join((_HEAD.pack(bytes.fromhex(self.transfer), self.offset), self.data))

    @classmethod
    def decode(cls, packet: bytes) -> Self:
        """Decode a chunk. Raises PacketTruncated or PacketTooLarge."""
        if len(packet) <= _HEAD.size:
            raise PacketTruncated(f"chunk of {len(packet)} bytes is shorter than its header of {_HEAD.size}")
        if len(packet) > _HEAD.size + MAX_CHUNK_BYTES:
            raise PacketTooLarge(
                f"chunk of {len(packet)} bytes; at most {_HEAD.size + MAX_CHUNK_BYTES} are allowed"
            )
        transfer, offset = _HEAD.unpack_from(packet)
        return cls(transfer.hex(), offset, memoryview(packet)[_HEAD.size :])


Payload = bytes | bytearray | memoryview | mmap
Outgoing = Offer | Chunk
Receipt = Resume | Ack | Refuse


def digest_of(payload: Payload) -> str:
    """Return the BLAKE2b-128 digest of a payload, in 32 hex digits."""
    return hashlib.blake2b(payload, digest_size=DIGEST_BYTES).hexdigest()


def transfer_id(key: TransferKey, device: str, digest: str) -> str:
    """Return the id of a transfer, 32 hex digits; `device` is the device's name in either direction."""
    return digest_of(msgspec.json.encode((key, device, digest)))


def objection(offer: Offer, device: str, max_bytes: int) -> str | None:
    """Return the reason to reject an offer before any memory is allocated; None if it is acceptable.

    The id is computed again, because it names a file and must never belong to two payloads.
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
        offer: the offer.
        part: the bytes received so far; a part of an earlier process is continued.
        complete: True once the payload is complete, verified and flushed to disk.
        received_bytes: bytes of received chunks, including repeats and headers.
    """

    def __init__(self, offer: Offer, part: Part) -> None:
        self.offer = offer
        self.part = part
        self.complete = False
        self.received_bytes = 0
        self._mismatches = 0
        self._asked_for: int | None = None  # offset of the last Resume
        # time of the first and of the last chunk, and the bytes in between
        self._flow: tuple[float, float, int] | None = None

    @property
    def goodput_bps(self) -> float | None:
        """New payload bits per second from the first to the last chunk; None before the second chunk."""
        if self._flow is None or self._flow[1] <= self._flow[0]:
            return None
        return 8 * self._flow[2] / (self._flow[1] - self._flow[0])

    def has(self, packet: bytes) -> bool:
        """True if a chunk brings no new bytes; only the chunk's header is read."""
        if len(packet) <= _HEAD.size:
            return True
        return int(_HEAD.unpack_from(packet)[1]) + len(packet) - _HEAD.size <= self.part.size

    def handle_offer(self, offer: Offer) -> Receipt:
        """Answer an offer. Raises StoreError."""
        if offer != self.offer:
            return Refuse(offer.transfer, "this transfer was offered with other properties before")
        if self.complete:
            return self._ack()
        if self.part.size > self.offer.num_bytes:
            self.part.clear()
        return self._verify() if self.part.size == self.offer.num_bytes else self._resume()

    def handle_chunk(self, chunk: Chunk, now: float) -> Receipt | None:
        """Accept the chunk if it brings the next byte.

        Raises:
            PacketTooLarge: the chunk reaches beyond the offered size.
            StoreError: the disk is full. No data are lost: the sender offers the payload again later.
        """
        end = chunk.offset + len(chunk.data)
        if end > self.offer.num_bytes:
            raise PacketTooLarge(
                f"chunk ends at byte {end}, but the payload has {self.offer.num_bytes} bytes"
            )
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
