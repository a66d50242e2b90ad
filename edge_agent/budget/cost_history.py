"""The measured costs of a device's last ten rounds, and estimates from them.

An estimate is the lower median of the last five rounds that have the figure. So three new rounds move it,
and a single outlier does not. Implausible figures are dropped (see `plausible`).
"""

from collections.abc import Callable, Hashable
from statistics import median_low
from typing import Any, Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from fleetune.edge_agent.budget.bandwidth_forecast import RECENT, BandwidthForecast, forecast_bandwidth
from fleetune.edge_agent.budget.safety_margin import ROUNDS as MOST_ERRORS
from fleetune.edge_agent.budget.safety_margin import ForecastError
from fleetune.protocols.round_cost import RoundCost

Direction = Literal["down", "up"]

ROUNDS = 10  # rounds that are kept; a ratio that did not fit is tried again after as many rounds
SLIGHT = 0.5  # smallest share of a task's estimated bytes
LONGEST_S = 86_400.0  # longest plausible part of a round; beyond it a clock jumped or a board slept
MOST_BYTES = 2**43
FASTEST_BYTES_PER_S = 12.5e9  # 100 Gbit/s
MOST_WATTS = 10_000.0


class Demand(Struct, frozen=True):
    """What a choice needs of a device, by the method's estimate.

    Attributes:
        ratio: ratio of the choice.
        bytes_down, bytes_up: payload bytes.
        samples: local work, counted in training steps of one sample, with evaluations.
        working_bytes: memory on top of what the process holds before it works.
        uplink: number of the encoding of the update's values, see `protocols.method.choice.Budget`.
    """

    ratio: float
    bytes_down: int
    bytes_up: int
    samples: float
    working_bytes: int
    uplink: int = 0

    def estimate(self, direction: Direction) -> int:
        """Return the estimated payload bytes in one direction."""
        return self.bytes_down if direction == "down" else self.bytes_up


class PastRound(Struct, frozen=True):
    """A past round: what it needed by the estimate, and its measured cost."""

    demand: Demand
    actual: RoundCost


_Found = TypeVar("_Found")


class CostHistory(Struct, frozen=True, dict=True):
    """The last rounds of one device in one run. At most 4 kB in MessagePack, and 2 kB of errors.

    Estimates are cached, because every choice of a decision uses the same ones.

    Attributes:
        past_rounds: oldest first.
        declined: number of consecutive rounds that the device declined since.
        errors: forecast errors, oldest first. Empty if there is no safety margin in time.
    """

    past_rounds: tuple[PastRound, ...] = ()
    declined: int = 0
    errors: tuple[ForecastError, ...] = ()

    def learned(self, demand: Demand, actual: RoundCost, error: ForecastError | None = None) -> "CostHistory":
        """Return the history after a complete round; a final evaluation, which sends nothing back, is
        ignored.

        The first round's error is dropped, as its forecast had no measurements. So are the bytes of a small
        first
        task: it is a difference to the initial model, and later tasks are larger.
        """
        known = self if error is None or not self.past_rounds else self.erring(error)
        measured = plausible(actual)
        if not self.past_rounds and (measured.bytes_down or 0) < SLIGHT * demand.bytes_down:
            measured = replace(measured, bytes_down=None, download_s=None)
        past_rounds = (*self.past_rounds, PastRound(demand, measured))[-ROUNDS:]
        return CostHistory(past_rounds, errors=known.errors)

    def erring(self, error: ForecastError) -> "CostHistory":
        """Return the history with the forecast error of a round added.

        Consecutive cancelled rounds count as one, the longest. They have one lasting cause, which the
        estimates learn.
        """
        before, last = self.errors[:-1], self.errors[-1:]
        recent = (
            (*before, error.longer(*last))
            if error.censored and last and last[0].censored
            else (*self.errors, error)
        )
        return replace(self, errors=recent[-MOST_ERRORS:])

    def declining(self) -> "CostHistory":
        """Return the history after a round that the device declined because no choice fits.

        After ten such rounds in a row, the history is cleared. The link may have improved, which only a new
        attempt shows.
        """
        declined = self.declined + 1
        return CostHistory() if declined >= ROUNDS else replace(self, declined=declined)

    def bytes_factor(self, direction: Direction, ratio: float, uplink: int = 0) -> float | None:
        """Return the ratio of actual bytes to the method's estimate; None if no round shows it.

        For updates only rounds with this encoding count.
        """

        def factor(past: PastRound) -> float | None:
            if direction == "up" and past.demand.uplink != uplink:
                return None
            return _over(_bytes(past.actual, direction), past.demand.estimate(direction))

        return _middle(self._figures(("bytes", direction, uplink), ratio, factor))

    def s_per_sample(self, ratio: float) -> float | None:
        """Return the seconds of work per sample, from rounds at this ratio, or else from all rounds."""

        def seconds(past: PastRound) -> float | None:
            return _over(past.actual.train_s, past.demand.samples)

        return _middle(self._figures("work", ratio, seconds))

    def processor_s_per_sample(self, ratio: float) -> float | None:
        """Return the processor seconds of work per sample, which other programs do not affect."""

        def seconds(past: PastRound) -> float | None:
            return _over(past.actual.processor_s, past.demand.samples)

        return _middle(self._figures("processor", ratio, seconds))

    def base_bytes(self, ratio: float) -> int | None:
        """Return the memory that the process holds before it works: peak memory minus the demand's working
        memory.

        The largest of the recent rounds counts, because too little memory ends the process.
        """

        def base(past: PastRound) -> float | None:
            peak = past.actual.memory_bytes
            return None if peak is None else peak - past.demand.working_bytes

        figures = self._figures("base", ratio, base)
        return int(max(figures)) if figures else None

    def joules_factor(self, expected: Callable[[RoundCost], float | None]) -> float | None:
        """Return the ratio of actual joules to those `expected` for the same seconds; None if no round shows
        it.
        """
        found = [_over(one.actual.joules, expected(one.actual)) for one in self.past_rounds]
        return _middle([factor for factor in found if factor is not None][-RECENT:])

    def link(
        self, direction: Direction, latency_s: float, s_per_byte: float | None = None
    ) -> BandwidthForecast | None:
        """Return the forecast of the link by past transfers, or as measured before them; None if both are
        unknown.

        Args:
            direction: direction of the transfers.
            latency_s: used as its latency while all transfers have one size.
            s_per_byte: measured before the first transfer; None if unknown.
        """
        return self._once(
            ("link", direction, latency_s, s_per_byte), lambda: self._link(direction, latency_s, s_per_byte)
        )

    def _link(
        self, direction: Direction, latency_s: float, s_per_byte: float | None
    ) -> BandwidthForecast | None:
        seen = [
            (float(num_bytes), seconds)
            for one in self.past_rounds
            if (num_bytes := _bytes(one.actual, direction)) is not None
            and (seconds := _seconds(one.actual, direction)) is not None
        ]
        if not seen:
            return BandwidthForecast(latency_s, s_per_byte) if s_per_byte else None
        return forecast_bandwidth(seen, latency_s, s_per_byte or 0.0, has_bursts=direction == "down")

    def _figures(
        self, what: Hashable, ratio: float, figure: Callable[[PastRound], float | None]
    ) -> list[float]:
        """Return the last figures of rounds at this ratio, or else of all rounds.

        `what` is the cache's key.
        """

        def all_of_them() -> list[tuple[float, float]]:
            pairs = ((one.demand.ratio, figure(one)) for one in self.past_rounds)
            return [(at, value) for at, value in pairs if value is not None]

        found = self._once(what, all_of_them)
        own = [value for at, value in found if at == ratio]
        return (own or [value for _, value in found])[-RECENT:]

    def _once(self, what: Hashable, work: Callable[[], _Found]) -> _Found:
        memory: dict[Any, Any] = self.__dict__
        if what not in memory:
            memory[what] = work()
        found: _Found = memory[what]
        return found


def plausible(actual: RoundCost) -> RoundCost:
    """Return `actual` without implausible figures, which become unknown.

    Plausible are bytes and memory above 0 and up to 8 TB, parts of a round above 0 s and up to a day, links
    up to 100 Gbit/s, and boards that draw more than 0 W and up to 10 kW.
    """
    down, up = _between(actual.bytes_down, MOST_BYTES), _between(actual.bytes_up, MOST_BYTES)
    known = RoundCost(
        bytes_down=down,
        bytes_up=up,
        download_s=_between(actual.download_s, LONGEST_S, (down or 0) / FASTEST_BYTES_PER_S),
        train_s=_between(actual.train_s, LONGEST_S),
        upload_s=_between(actual.upload_s, LONGEST_S, (up or 0) / FASTEST_BYTES_PER_S),
        memory_bytes=_between(actual.memory_bytes, MOST_BYTES),
        processor_s=_between(actual.processor_s, LONGEST_S),
    )
    return replace(known, joules=_between(actual.joules, known.known_s * MOST_WATTS))


_Number = TypeVar("_Number", int, float)


def _between(value: _Number | None, most: float, least: float = 0.0) -> _Number | None:
    """Return `value` if it is above `least` and at most `most`, else None; NaN gives None."""
    return value if value is not None and least < value <= most else None


def _middle(figures: list[float]) -> float | None:
    return median_low(figures) if figures else None


def _over(actual: float | None, expected: float | None) -> float | None:
    return actual / expected if actual is not None and expected else None


def _bytes(cost: RoundCost, direction: Direction) -> int | None:
    return cost.bytes_down if direction == "down" else cost.bytes_up


def _seconds(cost: RoundCost, direction: Direction) -> float | None:
    return cost.download_s if direction == "down" else cost.upload_s
