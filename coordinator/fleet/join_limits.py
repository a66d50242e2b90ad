"""Limits of the join server: connections, refused requests, and lines in its log."""

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from fleetune.coordinator.rate_limiter import TokenBucket, TokenBuckets
from fleetune.protocols.one_line import flat

MAX_CONNECTIONS, MAX_OF_ADDRESS = 256, 48  # at the same time; a connection holds 0.3 MB
# A fleet behind one address may join at once; each device needs two connections.
ADDRESS_BURST, ADDRESS_RATE = 200, 5.0  # connections
TOTAL_BURST, TOTAL_RATE = 1000, 50.0
REFUSED_BURST, REFUSED_RATE = 20, 0.2  # refused requests of one address
SAID_S = 60.0  # one line for each cause in this time

log = logging.getLogger(__name__)


@dataclass
class Limits:
    """How many connections and refused requests are accepted, for each address and in all.

    All addresses are results of `network_of`.

    Attributes:
        clock: seconds of a monotonic clock.
        open: the connections that are open now, oldest first, with their addresses.
    """

    clock: Callable[[], float] = time.monotonic
    open: dict[Hashable, str] = field(default_factory=dict)
    _address: TokenBuckets = field(default_factory=lambda: TokenBuckets(ADDRESS_BURST, ADDRESS_RATE))
    _total: TokenBucket = field(default_factory=lambda: TokenBucket(TOTAL_BURST, TOTAL_RATE))
    _refused: TokenBuckets = field(default_factory=lambda: TokenBuckets(REFUSED_BURST, REFUSED_RATE))

    def admits(self, address: str) -> bool:
        """True if another connection of this address is served; False: close it before any TLS."""
        return self._address.of(address).take(self.clock()) and self._total.take(self.clock())

    def in_the_way(self, address: str) -> Hashable | None:
        """Return the open connection to close before another of this address is served; None if none.

        It is the oldest of the address that has the most. So idle connections do not keep others out.
        """
        counts = Counter(self.open.values())
        if counts[address] < MAX_OF_ADDRESS:
            if len(self.open) < MAX_CONNECTIONS:
                return None
            address = counts.most_common(1)[0][0]
        return next(one for one, its in self.open.items() if its == address)

    def take(self, address: str) -> bool:
        """Take one of the requests of this address that may be refused; False if there is none left."""
        return self._refused.of(address).take(self.clock())

    def give_back(self, address: str) -> None:
        """Return what `take` took, because the request was not refused."""
        self._refused.of(address).give()


class RefusalLog:
    """Logs refused requests: for each cause one line a minute, which counts the ones before it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said_at: dict[str, float] = {}
        self._unsaid: Counter[str] = Counter()

    def say(self, cause: str, address: str, line: str) -> None:
        """Log one refusal, or count it."""
        now = self._clock()
        if now - self._said_at.get(cause, -SAID_S) < SAID_S:
            self._unsaid[cause] += 1
            return
        self._said_at[cause] = now
        more = self._unsaid.pop(cause, 0)
        counted = f" (and {more} more requests like it since the last such line)" if more else ""
        log.warning("join request from %s refused: %s%s", address, flat(line), counted)


def network_of(host: str) -> str:
    """Return the network that limits count as one address: of IPv6, 64 bits."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))
