"""A device's link and the time of each transfer over it, for the virtual clock and for emulation.

Rates count TCP payload. In simulation a link with packet loss carries less than its rate, see `tcp_bps`.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

from msgspec import Struct

from fleetune.protocols.errors import SettingError

Direction = Literal["up", "down"]
SEGMENT_BYTES = 1448  # bytes of TCP payload in a full Ethernet packet


class Link(Protocol):
    """One device's link to the coordinator.

    Attributes:
        delay_s: one-way delay; a ping takes twice as long.
        loss: probability that a packet is lost, in each direction, 0..1.
    """

    @property
    def delay_s(self) -> float: ...

    @property
    def loss(self) -> float: ...

    def rate_bps(self, time_s: float, direction: Direction) -> float:
        """Return the rate of the link at time `time_s`, without the effect of loss; 0 in an outage."""
        ...

    def bits(self, start_s: float, end_s: float, direction: Direction) -> float:
        """Return the number of bits that one TCP connection without pauses carries between two times."""
        ...

    def finish_s(self, start_s: float, num_bytes: float, direction: Direction) -> float:
        """Return when the last byte arrives of a transfer that starts at `start_s`; includes `delay_s`."""
        ...


def tcp_bps(rate_bps: float, delay_s: float, loss: float) -> float:
    """Return the average rate of one TCP connection on a link that loses packets at random.

    The average window is sqrt(3 / (2 * loss)) segments a round trip (Mathis, Semke, Mahdavi, Ott 1997), or
    CUBIC's window if that is larger (RFC 9438, section 5.1, C = 0.4, beta = 0.7). Loss keeps the window too
    small to fill a queue, so the round trip is twice the delay.
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
    """A link with constant rates.

    Raises:
        SettingError: a rate is not positive, the delay is negative, or the loss is outside 0..1.
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
    """The bits carried since time 0, as a function of time: linear pieces over one period, which then
    repeats.
    """

    times_s: list[float]  # start of each of the n stretches, then the end of the period
    rates_bps: list[float]  # rate of each of the n stretches
    bits: list[float]  # bits carried at the start of each stretch, then at the end of the period

    def carried(self, time_s: float) -> float:
        periods, rest_s = divmod(time_s, self.times_s[-1])
        at = bisect_right(self.times_s, rest_s) - 1
        return periods * self.bits[-1] + self.bits[at] + self.rates_bps[at] * (rest_s - self.times_s[at])

    def reached_s(self, bits: float) -> float:
        """Return the earliest time at which `bits` > 0 have been carried."""
        periods, rest = divmod(bits, self.bits[-1])
        if not rest:
            periods, rest = periods - 1, self.bits[-1]
        end = bisect_left(self.bits, rest)
        # the stretch before `end` has a rate above 0, else `end` would not be the first index
        back_s = (self.bits[end] - rest) / self.rates_bps[end - 1]
        return periods * self.times_s[-1] + self.times_s[end] - back_s


class Trace(Struct, frozen=True, tag="trace", dict=True):
    """A link whose rates vary: constant from each of `times_s` to the next; the whole trace repeats.

    Attributes:
        times_s: start of each interval of constant rate, ascending; the first is 0.
        uplink_bps, downlink_bps: rate of each interval; 0 is an outage.
        period_s: length of the trace, greater than the last of `times_s`.

    Raises:
        SettingError: all rates of a direction are 0, the delay is negative, or the loss is outside 0..1.
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
                raise SettingError(
                    f"the {word} of a link trace is always 0, so nothing would arrive; give at least one"
                    " rate above 0"
                )

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
