"""How much of a payload may be on its way at once.

A control message waits behind whatever is in flight, so the window aims at a fixed queueing delay
rather than at a fixed size: FAST TCP (Wei, Jin, Low and Hegde 2006, eq. 1 with gamma = 1) with a
target in seconds, w <- w * (base + TARGET_QUEUE_S) / rtt, at most doubled or halved in one round trip.
On a link of capacity C it settles at w = C * (base + TARGET_QUEUE_S): the link never idles and a
control message waits about TARGET_QUEUE_S; on a fast link it grows to MAX_CHUNKS whole chunks.
"""

TARGET_QUEUE_S = 0.2
MIN_CHUNK_BYTES = 8 * 1024
MAX_CHUNK_BYTES = 1024 * 1024
DEFAULT_CHUNK_BYTES = 256 * 1024
MAX_CHUNKS = 16


class Window:
    """The congestion window of one peer's outgoing transfers; it outlives each of them.

    Attributes:
        limit_bytes: payload that may be unacknowledged; never under two of the smallest chunks.
        base_s: the shortest round trip seen since the last `reset`, infinite before the first.
        answer_s: how long the peer took to answer the latest offer, counted from when it was first made.
        goes_along: the first window is sent with its offer. Not where it was lost: a broker may keep no order
            between two topics, and whoever gets a chunk before its offer drops it.
    """

    def __init__(self, max_chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> None:
        self._max_chunk = min(max(max_chunk_bytes, 1), MAX_CHUNK_BYTES)
        self._min_chunk = min(MIN_CHUNK_BYTES, self._max_chunk)
        self.reset()

    @property
    def chunk_bytes(self) -> int:
        """A quarter of the window, so that acknowledgements come evenly."""
        return min(max(self.limit_bytes // 4, self._min_chunk), self._max_chunk)

    def reset(self) -> None:
        """Another connection, perhaps over another link: forget everything."""
        self.limit_bytes = 2 * self._min_chunk
        self.base_s = float("inf")
        self.answer_s = 0.0
        self.goes_along = True

    def collapse(self) -> None:
        """Nothing was acknowledged for long: start small again, on the same link."""
        self.limit_bytes = 2 * self._min_chunk

    def observe(self, rtt_s: float) -> None:
        """A round trip that may be shorter than any before."""
        self.base_s = min(self.base_s, rtt_s)

    def adjust(self, rtt_s: float) -> None:
        """A chunk sent when the window was full came back after `rtt_s`."""
        self.observe(rtt_s)
        ratio = (self.base_s + TARGET_QUEUE_S) / max(rtt_s, 1e-6)
        self._scale(min(max(ratio, 0.5), 2.0))

    def lost(self) -> None:
        """The receiver missed a chunk: some queue overflowed."""
        self._scale(0.5)

    def _scale(self, ratio: float) -> None:
        wanted = int(self.limit_bytes * ratio)
        self.limit_bytes = min(max(wanted, 2 * self._min_chunk), MAX_CHUNKS * self._max_chunk)
