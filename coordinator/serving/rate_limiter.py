"""How much one device may ask of the coordinator: token buckets on the loop's own clock."""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class TokenBucket:
    """Holds at most `size` tokens and gains `rate` a second; full at first.

    Attributes:
        size: how many may be taken at once.
        rate: tokens a second.
        refused: how many were asked for in vain since the last that was given.
    """

    size: float
    rate: float
    refused: int = 0
    _level: float | None = None
    _seen_at: float = 0.0

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Whether there was enough; `now` is in seconds of a clock that never jumps."""
        level = self.size if self._level is None else self._level + (now - self._seen_at) * self.rate
        self._level, self._seen_at = min(self.size, level), now
        if self._level < tokens:
            self.refused += 1
            return False
        self._level -= tokens
        self.refused = 0
        return True

    def give(self) -> None:
        """One more may be taken, but never more than `size`."""
        if self._level is not None:
            self._level = min(self.size, self._level + 1)


class TokenBuckets:
    """One bucket a name; of `most` names, those heard of last."""

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
