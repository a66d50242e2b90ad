"""What a device's link carries, and when: for transfers on the virtual clock and for emulated links alike.

Rates are of TCP payload. A link that loses packets carries less than its rate in simulation, see `tcp_bps`.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from msgspec import Struct

from fleetune.protocols.errors import SettingError

Direction = Literal["up", "down"]
SEGMENT_BYTES = 1448  # TCP payload of a full packet on Ethernet


class Link(Protocol):
    """One device's link to the coordinator.

    Attributes:
        delay_s: one way; a ping takes twice that.
        loss: chance that a packet is lost, each way, 0..1.
    """

    @property
    def delay_s(self) -> float: ...

    @property
    def loss(self) -> float: ...

    def rate_bps(self, time_s: float, direction: Direction) -> float:
        """What the link itself carries at that moment; 0 in an outage."""
        ...

    def bits(self, start_s: float, end_s: float, direction: Direction) -> float:
        """What one TCP connection that never pauses gets through between the two moments."""
        ...

    def finish_s(self, start_s: float, num_bytes: float, direction: Direction) -> float:
        """When the last byte of a transfer that starts at `start_s` >= 0 is there, `delay_s` included."""
        ...


def tcp_bps(rate_bps: float, delay_s: float, loss: float) -> float:
    """What one TCP connection makes of a link's rate when packets are lost at random.

    One window of segments a round trip: sqrt(3 / (2 * loss)) on average (Mathis, Semke, Mahdavi, Ott 1997),
    or CUBIC's, where that is more (RFC 9438, section 5.1, C = 0.4, beta = 0.7). A window that loss keeps
    small leaves no queue, so the round trip is twice the delay.
    """
    if not loss or not delay_s:
        return rate_bps
    round_trip_s = 2 * delay_s
    window = max(math.sqrt(1.5 / loss), 1.054 * math.pow(round_trip_s / loss, 0.75))
    return min(rate_bps, SEGMENT_BYTES * 8 * window / round_trip_s)


def _check(delay_s: float, loss: float) -> None:
    if not (0 <= delay_s < math.inf):
        raise SettingError(f"a link's delay is {delay_s:g} s; it must be 0 or more")
    if not (0 <= loss < 1):
        raise SettingError(f"a link's loss is {loss * 100:g} %; it must be 0 or more and less than 100")


class Constant(Struct, frozen=True, tag="constant"):
    """A link that is always the same.

    Raises:
        SettingError: a rate that is not positive, a negative delay, a loss outside 0..1.
    """

    uplink_bps: float
    downlink_bps: float
    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        _check(self.delay_s, self.loss)
        for word, rate in (("uplink", self.uplink_bps), ("downlink", self.downlink_bps)):
            if not (0 < rate < math.inf):
                raise SettingError(f"a link's {word} is {rate:g} bit/s; it must be more than 0")

    def rate_bps(self, time_s: float, direction: Direction) -> float:  # noqa: ARG002 - the same at any time
        return self.uplink_bps if direction == "up" else self.downlink_bps

    def bits(self, start_s: float, end_s: float, direction: Direction) -> float:
        return tcp_bps(self.rate_bps(0, direction), self.delay_s, self.loss) * (end_s - start_s)

    def finish_s(self, start_s: float, num_bytes: float, direction: Direction) -> float:
        rate = tcp_bps(self.rate_bps(0, direction), self.delay_s, self.loss)
        return start_s + num_bytes * 8 / rate + self.delay_s


@dataclass(frozen=True)
class _Curve:
    """Bits carried since time 0, piecewise linear over one period and on from there."""

    times_s: list[float]  # n stretches begin here; the last of the n + 1 is the period's end
    rates_bps: list[float]  # of the n stretches
    bits: list[float]  # carried when each stretch begins, and by the period's end

    def carried(self, time_s: float) -> float:
        periods, rest_s = divmod(time_s, self.times_s[-1])
        at = bisect_right(self.times_s, rest_s) - 1
        return periods * self.bits[-1] + self.bits[at] + self.rates_bps[at] * (rest_s - self.times_s[at])

    def reached_s(self, bits: float) -> float:
        """The first moment at which `bits` > 0 are carried."""
        periods, rest = divmod(bits, self.bits[-1])
        if not rest:
            periods, rest = periods - 1, self.bits[-1]
        end = bisect_left(self.bits, rest)
        # the stretch before `end` carries something, else `end` would not be the first
        back_s = (self.bits[end] - rest) / self.rates_bps[end - 1]
        return periods * self.times_s[-1] + self.times_s[end] - back_s


class Trace(Struct, frozen=True, tag="trace", dict=True):
    """A link whose rates change with time: constant from each of `times_s` to the next, then all over again.

    Attributes:
        times_s: ascending, the first is 0.
        uplink_bps, downlink_bps: from each of them on; 0: an outage.
        period_s: after which it repeats, beyond the last of `times_s`.

    Raises:
        SettingError: nothing ever passes in one direction, a negative delay, a loss outside 0..1.
    """

    times_s: tuple[float, ...]
    uplink_bps: tuple[float, ...]
    downlink_bps: tuple[float, ...]
    period_s: float
    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        _check(self.delay_s, self.loss)
        for word, rates in (("uplink", self.uplink_bps), ("downlink", self.downlink_bps)):
            if not any(rates):
                raise SettingError(f"the {word} of a link trace is 0 throughout: nothing would ever arrive")

    @cached_property
    def _curves(self) -> dict[Direction, _Curve]:
        return {"up": self._curve(self.uplink_bps), "down": self._curve(self.downlink_bps)}

    def _curve(self, rates_bps: tuple[float, ...]) -> _Curve:
        rates = [tcp_bps(rate, self.delay_s, self.loss) for rate in rates_bps]
        times = [*self.times_s, self.period_s]
        bits = [0.0]
        for rate, start, end in zip(rates, times, times[1:], strict=False):
            bits.append(bits[-1] + rate * (end - start))
        return _Curve(times, rates, bits)

    def rate_bps(self, time_s: float, direction: Direction) -> float:
        rates = self.uplink_bps if direction == "up" else self.downlink_bps
        return rates[bisect_right(self.times_s, time_s % self.period_s) - 1]

    def bits(self, start_s: float, end_s: float, direction: Direction) -> float:
        curve = self._curves[direction]
        return curve.carried(end_s) - curve.carried(start_s)

    def finish_s(self, start_s: float, num_bytes: float, direction: Direction) -> float:
        curve = self._curves[direction]
        if not num_bytes:
            return start_s + self.delay_s
        done_s = curve.reached_s(curve.carried(start_s) + num_bytes * 8)
        return max(done_s, start_s) + self.delay_s
