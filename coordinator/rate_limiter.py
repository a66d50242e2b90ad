"""Token buckets that limit how many messages or requests one device may send."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """A bucket that holds at most `size` tokens and gains `rate` tokens a second. It starts full.

    Attributes:
        size: number of tokens that may be taken at once.
        rate: number of tokens gained in a second.
        refused: the number of failed attempts since the last success.
    """

    size: float
    rate: float
    refused: int = 0
    _level: float | None = None
    _seen_at: float = 0.0

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take tokens, and return True if there were enough; `now` is in seconds of a monotonic clock."""
        level = self.size if self._level is None else self._level + (now - self._seen_at) * self.rate
        self._level, self._seen_at = min(self.size, level), now
        if self._level < tokens:
            self.refused += 1
            return False
        self._level -= tokens
        self.refused = 0
        return True

    def give(self) -> None:
        """Add one token, up to `size`."""
        if self._level is not None:
            self._level = min(self.size, self._level + 1)


class TokenBuckets:
    """One bucket for each name; only the `most` recently used buckets are stored."""

    def __init__(self, size: float, rate: float, most: int = 10_000) -> None:
        self._size, self._rate, self._most = size, rate, most
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def of(self, name: str) -> TokenBucket:
        bucket = self._buckets.get(name)
        if bucket is None:
            bucket = self._buckets[name] = TokenBucket(self._size, self._rate)
            if len(self._buckets) > self._most:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(name)
        return bucket
