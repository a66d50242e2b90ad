"""How long a transfer takes, by those of the past.

A payload that comes down is timed from its offer, which it follows at once. What its link lets through in one
go (the tokens that a shaper has saved, the first packets of a TCP connection) then seems to take no time, so
small payloads say next to nothing of what larger ones will take.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, median_low

RECENT = 5
APART = 1.5  # sizes of two transfers, beyond which they tell latency from bandwidth
MOST_LATENCY = 0.9  # of the quickest recent transfer: however small, some of its time went into its bytes
BURST_BYTES = 14_600.0  # what TCP sends before it waits for an answer (RFC 6928: ten segments)

Transfer = tuple[float, float]
"""Bytes, and the seconds that they took."""


@dataclass(frozen=True)
class LinkTimes:
    """How long a transfer takes.

    Attributes:
        latency_s: whatever its size; below 0: its first bytes come at once.
        s_per_byte: on top.
        known_bytes: what it has carried; for each byte beyond them it takes `s_per_byte_beyond`, if that is
            longer.
        s_per_byte_beyond: as measured before there were transfers.
        s_per_byte_at_least: as the quickest one.
    """

    latency_s: float
    s_per_byte: float
    known_bytes: float = 0.0
    s_per_byte_beyond: float = 0.0
    s_per_byte_at_least: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        beyond = max(0.0, num_bytes - self.known_bytes) * max(0.0, self.s_per_byte_beyond - self.s_per_byte)
        return max(
            self.latency_s + num_bytes * self.s_per_byte + beyond, num_bytes * self.s_per_byte_at_least
        )


def of_transfers(
    seen: Sequence[Transfer], latency_s: float, measured_s_per_byte: float, has_bursts: bool
) -> LinkTimes:
    """The link as its transfers have shown it.

    Args:
        seen: one at least, oldest first.
        latency_s: taken for its latency as long as all transfers are of one size.
        measured_s_per_byte: before there were transfers; 0: unknown. Where all could have come in one go, no
            byte beyond them is expected to take less.
        has_bursts: whether its first bytes may have come at once.
    """
    recent = seen[-RECENT:]
    found = _latency(seen, BURST_BYTES if has_bursts else 0.0)
    quickest = min(seconds for _, seconds in recent)
    latency = min(latency_s if found is None else found, MOST_LATENCY * quickest)
    largest = max(size for size, _ in seen)
    return LinkTimes(
        latency,
        median_low([(seconds - latency) / size for size, seconds in recent]),
        largest,
        measured_s_per_byte if has_bursts and largest < BURST_BYTES else 0.0,
        min(seconds / size for size, seconds in seen) if has_bursts else 0.0,
    )


def _latency(seen: Sequence[Transfer], burst_bytes: float) -> float | None:
    """Seconds at size 0, by the median slope between transfers of different sizes (Theil 1950, Sen 1968).

    None: there are no two sizes, or the larger transfers were the quicker ones, because the link changed.
    """
    pairs = [sorted(pair) for pair in combinations(seen, 2)]
    slopes = [(s2 - s1) / (b2 - b1) for (b1, s1), (b2, s2) in pairs if b2 >= APART * b1]
    if not slopes or (slope := median(slopes)) <= 0:
        return None
    return max(-burst_bytes * slope, median(seconds - slope * size for size, seconds in seen))
