"""The sending half of a transfer. transfer.py describes the dialogue, and pacing.py the congestion window."""

from collections import deque
from dataclasses import dataclass

from fleetune.protocols.pages_on_disk import release
from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.pacing import Window
from fleetune.protocols.wire.transfer import Chunk, Outgoing, Payload, Receipt, digest_of, transfer_id

FIRST_WAIT_S = 2.0
LONGEST_WAIT_S = 30.0
# limit on requests for bytes that the receiver had requested before, other than answers to an offer
MOST_REWINDS = 5
RELEASED_EVERY_BYTES = 2**23  # after so many acknowledged bytes, pages of a payload on disk are dropped
# kinds of payload that are rarely refused, so that chunks sent with the offer are rarely wasted
WITH_OFFER = {"task", "update"}


@dataclass
class _OfferTimer:
    """Decides when an unanswered offer is repeated.

    Attributes:
        wake_at: time of the next repeat; None for never.
        offered_at: time of the unanswered offer; None if the last one was answered.
        asked_at: time of the first offer in a row of unanswered offers.
        times: number of offers so far.
        wait_s: present wait for an answer.
        rtt_s: latest round trip of a chunk.
    """

    wake_at: float | None = None
    offered_at: float | None = None
    asked_at: float = 0.0
    times: int = 0
    wait_s: float = FIRST_WAIT_S
    rtt_s: float = 0.0

    def offer(self, now: float, answer_s: float) -> None:
        """Record an offer; `answer_s` is the time that the peer took to answer the offer before."""
        self.times += 1
        if self.offered_at is None:
            self.asked_at = now
        self.offered_at = now
        self.wake_at = now + max(self.wait_s, 4 * self.rtt_s, min(2 * answer_s, LONGEST_WAIT_S))

    def heard(self, now: float) -> None:
        """Restart the wait, because the peer answered."""
        self.wait_s = FIRST_WAIT_S
        self.wake_at = now + max(self.wait_s, 4 * self.rtt_s)


@dataclass
class _Goodput:
    """Acknowledged bytes and the seconds that they took; `since` is the time of the last progress."""

    since: float = 0.0
    _seconds: float = 0.0
    _num_bytes: int = 0

    def add(self, num_bytes: int, now: float) -> None:
        """Count newly acknowledged bytes."""
        self._seconds += now - self.since
        self._num_bytes += num_bytes
        self.since = now

    @property
    def bps(self) -> float | None:
        """Bits per second; None before the first acknowledgement."""
        return 8 * self._num_bytes / self._seconds if self._seconds > 0 else None


class _Flight:
    """The chunks of a payload, and which of them are in flight.

    Attributes:
        next: offset of the next chunk.
        mark: the acknowledgement of this offset adjusts the window.
        sent_bytes: bytes of sent chunks, including repeats and headers.
    """

    def __init__(self, payload: memoryview, window: Window) -> None:
        self._payload, self._window = payload, window
        self.next = self.mark = self.sent_bytes = 0
        # chunks below this offset may have been sent twice, so their round trip is ambiguous
        self._first_sent = 0
        self._chunks: deque[tuple[int, int, float]] = deque()  # start, end, time of sending

    def restart(self, offset: int) -> None:
        """Send everything again from this offset on."""
        self._first_sent = max(self._first_sent, self.next)
        self.next = self.mark = offset
        self._chunks.clear()

    def acknowledged(self, offset: int, now: float) -> float | None:
        """Record an acknowledgement; return the round trip in seconds, or None if unknown."""
        rtt = None
        while self._chunks and self._chunks[0][1] <= offset:
            start, _, sent_at = self._chunks.popleft()
            # a chunk that may have been sent twice gives no round trip: its Ack may answer the first copy
            if start >= self._first_sent:
                rtt = now - sent_at
        self.next = max(self.next, offset)
        return rtt

    def fill(self, transfer: str, acked_bytes: int, now: float) -> list[Outgoing]:
        """Send as much as the window allows, and at least one chunk if nothing is in flight."""
        chunks: list[Outgoing] = []
        while self.next < len(self._payload):
            end = min(self.next + self._window.chunk_bytes, len(self._payload))
            if self._chunks and end - self._chunks[0][0] > self._window.limit_bytes:
                break
            chunk = Chunk(transfer, self.next, self._payload[self.next : end])
            self._chunks.append((self.next, end, now))
            self.sent_bytes += chunk.num_bytes
            self.next = end
            chunks.append(chunk)
        if acked_bytes >= self.mark:
            self.mark = self.next
        return chunks

    def end(self) -> None:
        """Release the payload."""
        self._payload = memoryview(b"")


class Sender:
    """The sending half of one transfer; `perhaps_there`: see `Outbox.post`.

    Attributes:
        offer: the offer; `offer.transfer` is the id of the transfer.
        done: True once the receiver has the payload, verified and on disk.
        refused: the receiver's rejection reason.
        acked_bytes: payload bytes that the receiver has on disk.
        started_at: time of the first offer.
    """

    def __init__(
        self,
        device: str,
        key: TransferKey,
        payload: Payload,
        *,
        ratio: float | None = None,
        window: Window | None = None,
        perhaps_there: bool = False,
    ) -> None:
        view = memoryview(payload).cast("B")
        digest = digest_of(view)
        self.offer = Offer(transfer_id(key, device, digest), digest, len(view), key, ratio)
        release(payload)  # the digest has read all of it
        self._payload: Payload = payload
        self._window = window or Window()
        self._timer, self._flight = _OfferTimer(), _Flight(view, self._window)
        self.done = False
        self.refused: str | None = None
        self.acked_bytes = 0
        self.started_at: float | None = None
        self._resumed: int | None = None  # offset of the last Resume
        # largest offset and number of rewinds, of Resumes that answer no offer
        self._furthest, self._rewinds = -1, 0
        self._may_go_along = key.kind in WITH_OFFER and not perhaps_there
        self._went_along = False  # the first window was sent with the offer, and its Resume is still to come
        self._goodput = _Goodput()

    @property
    def wake_at(self) -> float | None:
        """Time of the next call of `tick`; None for never."""
        return self._timer.wake_at

    @property
    def sent_bytes(self) -> int:
        """Bytes of sent chunks, including repeats and headers."""
        return self._flight.sent_bytes

    @property
    def ended(self) -> bool:
        return self.done or self.refused is not None

    @property
    def goodput_bps(self) -> float | None:
        """Acknowledged payload bits per second while connected; None before the first acknowledgement."""
        return self._goodput.bps

    def start(self, now: float) -> list[Outgoing]:
        """Send the first offer.

        The first window of a task or an update is sent with it if the receiver cannot have a part of the
        payload yet. This saves a round trip.
        """
        self.started_at = now
        offer = self._make_offer(now)
        if not (self._may_go_along and self._window.goes_along):
            return offer
        self._went_along, self._resumed, self._goodput.since = True, 0, now
        return [*offer, *self._fill(now)]

    def tick(self, now: float) -> list[Outgoing]:
        """Repeat the offer if the peer has been silent for too long.

        The wait is 2 s at first, or twice the time that the peer took to answer the previous offer. The wait
        doubles up to 30 s. The number of repeats is not limited.
        """
        if self.wake_at is None or now < self.wake_at:
            return []
        self._timer.wait_s = min(2 * self._timer.wait_s, LONGEST_WAIT_S)
        self._window.collapse()
        return self._make_offer(now)

    def reconnected(self, now: float) -> list[Outgoing]:
        """Repeat the offer at once, because the packets in flight are lost."""
        if self.started_at is None or self.ended:
            return []
        self._timer.wait_s, self._timer.offered_at = FIRST_WAIT_S, None
        self._went_along = False
        self._window.reset()
        return self._make_offer(now)

    def handle(self, message: Receipt, now: float) -> list[Outgoing]:
        """Handle a receipt; ignore it if it is invalid or belongs to another transfer."""
        if message.transfer != self.offer.transfer or self.started_at is None or self.ended:
            return []
        if self._timer.offered_at is not None:
            self._window.answer_s = now - self._timer.asked_at
        match message:
            case Refuse():
                self.refused = message.reason
                self._end()
                return []
            case Resume():
                return self._handle_resume(message.offset, now)
            case Ack():
                return self._handle_ack(message.offset, now)

    def _handle_resume(self, offset: int, now: float) -> list[Outgoing]:
        asked = self._timer.offered_at is not None
        if not 0 <= offset < self.offer.num_bytes or (not asked and offset == self._resumed):
            return []  # invalid, or a late copy of the Resume that is being served
        if self._timer.offered_at is None:
            if self._rewinds_too_often(offset):
                self.refused = f"it went back {MOST_REWINDS} times to bytes that it had asked for before"
                self._end()
                return []
            self._window.lost()
        elif self._timer.times == 1:
            self._window.observe(now - self._timer.offered_at)
        self._timer.offered_at = None
        if self._went_along and offset == self.acked_bytes == 0:
            self._went_along = False  # the receiver sent it before it saw the chunks behind the offer
            self._timer.heard(now)
            return self._fill(now)
        if asked and offset == self._resumed == 0:
            self._window.goes_along = False
        self._flight.restart(offset)
        self._resumed = self.acked_bytes = offset
        self._goodput.since = now
        self._timer.heard(now)
        return self._fill(now)

    def _rewinds_too_often(self, offset: int) -> bool:
        """True if the receiver has asked too often for bytes that it had already asked for.

        A correct receiver asks once for each gap, at growing offsets, and from 0 if the digest differs.
        """
        self._rewinds += int(offset <= self._furthest)
        self._furthest = max(self._furthest, offset)
        return self._rewinds > MOST_REWINDS

    def _handle_ack(self, offset: int, now: float) -> list[Outgoing]:
        if offset == self.offer.num_bytes:
            self._progress(offset, now)
            self.done = True
            self._end()
            return []
        if not self.acked_bytes < offset < self.offer.num_bytes:
            return []
        self._progress(offset, now)
        self._timer.heard(now)
        # While an offer is unanswered, nothing new is sent, because its Resume may ask for lost bytes.
        return self._fill(now) if self._timer.offered_at is None else []

    def _progress(self, offset: int, now: float) -> None:
        rtt = self._flight.acknowledged(offset, now)
        if rtt is not None:
            self._timer.rtt_s = rtt
            self._window.observe(rtt)
            if offset >= self._flight.mark:
                self._window.adjust(rtt)
        self._goodput.add(offset - self.acked_bytes, now)
        if offset // RELEASED_EVERY_BYTES > self.acked_bytes // RELEASED_EVERY_BYTES:
            release(self._payload)
        self.acked_bytes = offset

    def _fill(self, now: float) -> list[Outgoing]:
        return self._flight.fill(self.offer.transfer, self.acked_bytes, now)

    def _make_offer(self, now: float) -> list[Outgoing]:
        self._timer.offer(now, self._window.answer_s)
        return [self.offer]

    def _end(self) -> None:
        self._timer.wake_at = None
        release(self._payload)
        self._payload = b""
        self._flight.end()
