"""The sending half of a transfer. transfer.py describes the dialogue, and pacing.py the congestion window."""

from collections import deque

from fleetune.protocols.wire.messages import Ack, Offer, Refuse, Resume, TransferKey
from fleetune.protocols.wire.pacing import Window
from fleetune.protocols.wire.transfer import Chunk, Outgoing, Payload, Receipt, digest_of, transfer_id

FIRST_WAIT_S = 2.0
LONGEST_WAIT_S = 30.0
# limit on requests for bytes that the receiver had requested before, other than answers to an offer
MOST_REWINDS = 5
# kinds of payload that are rarely refused, so that chunks sent with the offer are rarely wasted
WITH_OFFER = {"task", "update"}


class Sender:
    """The sending half of one transfer; `perhaps_there`: see `Outbox.post`.

    Attributes:
        offer: the offer; `offer.transfer` is the id of the transfer.
        done: True once the receiver has the payload, verified and on disk.
        refused: the receiver's rejection reason.
        acked_bytes: payload bytes that the receiver has on disk.
        sent_bytes: bytes of sent chunks, including repeats and headers.
        started_at, ended_at: time of the first offer, and time of the end.
        wake_at: when `tick` must be called next; None for never.
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
        self._payload = memoryview(payload).cast("B")
        digest = digest_of(self._payload)
        self.offer = Offer(transfer_id(key, device, digest), digest, len(self._payload), key, ratio)
        self._window = window or Window()
        self.done = False
        self.refused: str | None = None
        self.acked_bytes = self.sent_bytes = 0
        self.started_at: float | None = None
        self.ended_at: float | None = None
        self.wake_at: float | None = None
        self._offered_at: float | None = None  # time of the unanswered offer
        self._asked_at = 0.0  # time of the first of several unanswered offers
        self._offers = 0
        self._wait_s = FIRST_WAIT_S
        self._rtt_s = 0.0
        self._next = 0  # offset of the next chunk
        self._resumed: int | None = None  # offset of the last Resume
        # largest offset and number of rewinds, of Resumes that answer no offer
        self._furthest, self._rewinds = -1, 0
        self._may_go_along = key.kind in WITH_OFFER and not perhaps_there
        self._went_along = False  # the first window was sent with the offer, and its Resume is still to come
        # chunks below this offset may have been sent twice, so their round trip is ambiguous
        self._first_sent = 0
        self._mark = 0  # the acknowledgement of this offset adjusts the window
        self._in_flight: deque[tuple[int, int, float]] = deque()  # start, end, time of sending
        self._busy_since = 0.0
        self._busy_s = 0.0
        self._busy_bytes = 0

    @property
    def ended(self) -> bool:
        return self.done or self.refused is not None

    @property
    def goodput_bps(self) -> float | None:
        """Acknowledged payload bits per second while connected; None before the first acknowledgement."""
        return 8 * self._busy_bytes / self._busy_s if self._busy_s > 0 else None

    def start(self, now: float) -> list[Outgoing]:
        """Send the first offer.

        The first window of a task or an update is sent with it if the receiver cannot have a part of the
        payload yet. This saves a round trip.
        """
        self.started_at = now
        offer = self._make_offer(now)
        if not (self._may_go_along and self._window.goes_along):
            return offer
        self._went_along, self._resumed, self._busy_since = True, 0, now
        return [*offer, *self._fill(now)]

    def tick(self, now: float) -> list[Outgoing]:
        """Repeat the offer after too long a silence.

        The wait is 2 s at first, or twice the time that the peer took to answer the offer before. It doubles
        up to 30 s. The number of repeats is not limited.
        """
        if self.wake_at is None or now < self.wake_at:
            return []
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)
        self._window.collapse()
        return self._make_offer(now)

    def reconnected(self, now: float) -> list[Outgoing]:
        """Repeat the offer at once, because the packets in flight are lost."""
        if self.started_at is None or self.ended:
            return []
        self._wait_s = FIRST_WAIT_S
        self._offered_at = None
        self._went_along = False
        self._window.reset()
        return self._make_offer(now)

    def handle(self, message: Receipt, now: float) -> list[Outgoing]:
        """Handle a receipt; ignore it if it is invalid or belongs to another transfer."""
        if message.transfer != self.offer.transfer or self.started_at is None or self.ended:
            return []
        if self._offered_at is not None:
            self._window.answer_s = now - self._asked_at
        match message:
            case Refuse():
                self.refused = message.reason
                self._end(now)
                return []
            case Resume():
                return self._handle_resume(message.offset, now)
            case Ack():
                return self._handle_ack(message.offset, now)

    def _handle_resume(self, offset: int, now: float) -> list[Outgoing]:
        asked = self._offered_at is not None
        if not 0 <= offset < self.offer.num_bytes or (not asked and offset == self._resumed):
            return []  # invalid, or a late copy of the Resume that is being served
        if self._offered_at is None:
            if self._rewinds_too_often(offset):
                self.refused = f"it went back {MOST_REWINDS} times to bytes that it had asked for before"
                self._end(now)
                return []
            self._window.lost()
        elif self._offers == 1:
            self._window.observe(now - self._offered_at)
        self._offered_at = None
        if self._went_along and offset == self.acked_bytes == 0:
            self._went_along = False  # the receiver sent it before it saw the chunks behind the offer
            self._heard(now)
            return self._fill(now)
        if asked and offset == self._resumed == 0:
            self._window.goes_along = False
        self._first_sent = max(self._first_sent, self._next)
        self._resumed = self._next = self._mark = self.acked_bytes = offset
        self._in_flight.clear()
        self._busy_since = now
        self._heard(now)
        return self._fill(now)

    def _rewinds_too_often(self, offset: int) -> bool:
        """True if the receiver has asked too often for bytes that it had asked for before.

        A correct receiver asks once for each gap, at growing offsets, and from 0 if the digest differs.
        """
        self._rewinds += int(offset <= self._furthest)
        self._furthest = max(self._furthest, offset)
        return self._rewinds > MOST_REWINDS

    def _handle_ack(self, offset: int, now: float) -> list[Outgoing]:
        if offset == self.offer.num_bytes:
            self._progress(offset, now)
            self.done = True
            self._end(now)
            return []
        if not self.acked_bytes < offset < self.offer.num_bytes:
            return []
        self._progress(offset, now)
        self._heard(now)
        # While an offer is unanswered, nothing new is sent, because its Resume may ask for lost bytes.
        return self._fill(now) if self._offered_at is None else []

    def _progress(self, offset: int, now: float) -> None:
        rtt = None
        while self._in_flight and self._in_flight[0][1] <= offset:
            start, _, sent_at = self._in_flight.popleft()
            # a chunk that may have been sent twice gives no round trip: its Ack may answer the first copy
            if start >= self._first_sent:
                rtt = now - sent_at
        if rtt is not None:
            self._rtt_s = rtt
            self._window.observe(rtt)
            if offset >= self._mark:
                self._window.adjust(rtt)
        self._busy_s += now - self._busy_since
        self._busy_bytes += offset - self.acked_bytes
        self._busy_since = now
        self.acked_bytes = offset
        self._next = max(self._next, offset)

    def _fill(self, now: float) -> list[Outgoing]:
        """Send as much as the window allows, and at least one chunk if nothing is in flight."""
        chunks: list[Outgoing] = []
        while self._next < self.offer.num_bytes:
            end = min(self._next + self._window.chunk_bytes, self.offer.num_bytes)
            if self._in_flight and end - self._in_flight[0][0] > self._window.limit_bytes:
                break
            chunk = Chunk(self.offer.transfer, self._next, self._payload[self._next : end])
            self._in_flight.append((self._next, end, now))
            self.sent_bytes += chunk.num_bytes
            self._next = end
            chunks.append(chunk)
        if self.acked_bytes >= self._mark:
            self._mark = self._next
        return chunks

    def _make_offer(self, now: float) -> list[Outgoing]:
        self._offers += 1
        if self._offered_at is None:
            self._asked_at = now
        self._offered_at = now
        patience_s = min(2 * self._window.answer_s, LONGEST_WAIT_S)
        self.wake_at = now + max(self._wait_s, 4 * self._rtt_s, patience_s)
        return [self.offer]

    def _heard(self, now: float) -> None:
        self._wait_s = FIRST_WAIT_S
        self.wake_at = now + max(self._wait_s, 4 * self._rtt_s)

    def _end(self, now: float) -> None:
        self.ended_at = now
        self.wake_at = None
        self._payload = memoryview(b"")
