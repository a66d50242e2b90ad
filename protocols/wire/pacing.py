"""The congestion window: limits how many bytes of a payload may be unacknowledged.

A control message waits behind the bytes in flight. So the window aims at a fixed queueing delay instead of a
fixed size. It follows FAST TCP (Wei, Jin, Low and Hegde 2006, eq. 1 with gamma = 1) with a target in seconds:
w <- w * (base + TARGET_QUEUE_S) / rtt, at most doubled or halved in one round trip.

On a link of capacity C the window settles at w = C * (base + TARGET_QUEUE_S). The link is then never idle,
and a control message waits about TARGET_QUEUE_S. On a fast link the window grows to MAX_CHUNKS whole chunks.
"""

TARGET_QUEUE_S = 0.2
MIN_CHUNK_BYTES = 8 * 1024
MAX_CHUNK_BYTES = 1024 * 1024
DEFAULT_CHUNK_BYTES = 256 * 1024
MAX_CHUNKS = 16


class Window:
    """The congestion window of one peer's outgoing transfers; it is kept from one transfer to the next.

    Attributes:
        limit_bytes: bytes of payload that may be unacknowledged; at least two of the smallest chunks.
        base_s: the shortest round trip since the last `reset`, in seconds; infinite before the first.
        answer_s: seconds that the peer took to answer the latest offer, counted from its first copy.
        goes_along: True if the first window is sent together with its offer. False once such chunks were
            lost: a broker may reorder two topics, and a receiver drops a chunk that arrives before its offer.
    """

    def __init__(self, max_chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._max_chunk = min(max(max_chunk_bytes, 1), MAX_CHUNK_BYTES)
        self._min_chunk = min(MIN_CHUNK_BYTES, self._max_chunk)
        self.reset()

    @property
    def chunk_bytes(self) -> int:
        """Size of the next chunk: a quarter of the window, so that acknowledgements arrive evenly."""
        return min(max(self.limit_bytes // 4, self._min_chunk), self._max_chunk)

    def reset(self) -> None:
        """Discard all measurements, because the new connection may use another link."""
        self.limit_bytes = 2 * self._min_chunk
        self.base_s = float("inf")
        self.answer_s = 0.0
        self.goes_along = True

    def collapse(self) -> None:
        """Restart with a small window on the same link, because no acknowledgement came for a long time."""
        self.limit_bytes = 2 * self._min_chunk

    def observe(self, rtt_s: float) -> None:
        """Record a round trip, which may be the shortest so far."""
        self.base_s = min(self.base_s, rtt_s)

    def adjust(self, rtt_s: float) -> None:
        """Adjust the window to the round trip of a chunk that was sent when the window was full."""
        self.observe(rtt_s)
        ratio = (self.base_s + TARGET_QUEUE_S) / max(rtt_s, 1e-6)
        self._scale(min(max(ratio, 0.5), 2.0))

    def lost(self) -> None:
        """Shrink the window, because a lost chunk means that a queue overflowed."""
        self._scale(0.5)

    def _scale(self, ratio: float) -> None:
        wanted = int(self.limit_bytes * ratio)
        self.limit_bytes = min(max(wanted, 2 * self._min_chunk), MAX_CHUNKS * self._max_chunk)
