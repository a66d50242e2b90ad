"""Bandwidth forecast: predicts the seconds of a transfer from past transfers.

A download is timed from its offer, which it follows at once. Bytes that a link passes in a burst (saved
tokens of a shaper, the first packets of a TCP connection) seem to take no time. So the times of small
payloads predict those of large payloads badly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median, median_low

RECENT = 5
SIZE_RATIO = 1.5  # ratio of two transfers' sizes from which latency and bandwidth can be told apart
MOST_LATENCY = 0.9  # share of the fastest recent transfer, as some of its time was spent on its bytes
BURST_BYTES = 14_600.0  # TCP's initial window (RFC 6928: ten segments)

Transfer = tuple[float, float]
"""Bytes of a transfer and its seconds."""


@dataclass(frozen=True)
class BandwidthForecast:
    """A link's predicted latency and bandwidth in one direction.

    Attributes:
        latency_s: seconds of a transfer of any size. Below 0: the first bytes arrive in a burst.
        s_per_byte: seconds of each byte.
        known_bytes: size of the largest transfer so far. Each byte beyond it takes `s_per_byte_beyond` if
            that is longer.
        s_per_byte_beyond: measured when the device joined.
        s_per_byte_at_least: seconds of each byte in the fastest transfer.
    """

    latency_s: float
    s_per_byte: float
    known_bytes: float = 0.0
    s_per_byte_beyond: float = 0.0
    s_per_byte_at_least: float = 0.0

    def seconds(self, num_bytes: float) -> float:
        """Return the predicted seconds of a transfer."""
        beyond = max(0.0, num_bytes - self.known_bytes) * max(0.0, self.s_per_byte_beyond - self.s_per_byte)
        return max(
            self.latency_s + num_bytes * self.s_per_byte + beyond, num_bytes * self.s_per_byte_at_least
        )


def forecast_bandwidth(
    transfers: Sequence[Transfer], latency_s: float, measured_s_per_byte: float, has_bursts: bool
) -> BandwidthForecast:
    """Return the forecast of a link from its past transfers.

    Args:
        transfers: at least one, oldest first.
        latency_s: used while all transfers have one size.
        measured_s_per_byte: measured when the device joined; 0: unknown. While every transfer fits into one
            burst, further bytes are expected to take at least this long.
        has_bursts: True if the first bytes may arrive in a burst.
    """
    recent = transfers[-RECENT:]
    found = _latency(transfers, BURST_BYTES if has_bursts else 0.0)
    fastest_s = min(seconds for _, seconds in recent)
    latency = min(latency_s if found is None else found, MOST_LATENCY * fastest_s)
    largest = max(size for size, _ in transfers)
    return BandwidthForecast(
        latency,
        median_low([(seconds - latency) / size for size, seconds in recent]),
        largest,
        measured_s_per_byte if has_bursts and largest < BURST_BYTES else 0.0,
        min(seconds / size for size, seconds in transfers) if has_bursts else 0.0,
    )


def _latency(transfers: Sequence[Transfer], burst_bytes: float) -> float | None:
    """Return the seconds at size 0, by the median slope between transfers (Theil 1950, Sen 1968).

    Returns:
        The latency; None if all transfers have about the same size, or larger ones were faster because the
        link changed.
    """
    pairs = [sorted(pair) for pair in combinations(transfers, 2)]
    slopes = [(s2 - s1) / (b2 - b1) for (b1, s1), (b2, s2) in pairs if b2 >= SIZE_RATIO * b1]
    if not slopes or (slope := median(slopes)) <= 0:
        return None
    return max(-burst_bytes * slope, median(seconds - slope * size for size, seconds in transfers))
