"""Which ratio a device can afford: the largest whose round fits every limit, by what is known.

One rule for a real agent and for the simulator:

    forecast = partial(predict, capability=capability, cost_history=cost_history)
    decision = decide(method.choices(report), forecast, limits_of(...), wanted=1.0, current=report.ratio)
    cost_history = cost_history.learned(demand(decision.choice, capability), actual)  # after the round

What is not known does not limit, and the explanation says so. More bandwidth, memory, time or energy never
gives a smaller ratio: they only ever lower a prediction or raise a limit. Once a device runs at a ratio
(`current`), it changes to a larger one only when that leaves `1 - SPARE` of every limit, so that it does
not swing between two. Where time has a margin (`within`), what a round takes with it has to fit; not at the
smallest ratio: better late now and then than never.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fleetune.edge_agent.budget.owner_policy import Limits
from fleetune.protocols.method.choice import LOCAL_WORKS, Choice, DeviceReport, RatioCandidate
from fleetune.protocols.round_cost import RoundCost

SPARE = 0.95  # share of each limit that a ratio above the present one may need

Forecast = Callable[[Choice], RoundCost]
ForecastOfWork = Callable[[Choice, float], RoundCost]  # with a share of local training
Within = Callable[[RoundCost], float]
"""Seconds, of which the deadline must leave room for a round of such a forecast."""


def no_margin(predicted: RoundCost) -> float:
    """What is expected."""
    return predicted.known_s


@dataclass(frozen=True)
class Verdict:
    """One choice held against the limits.

    Attributes:
        choice: the ratio and its cost.
        predicted: what a round at it would take.
        shares: what it needs of each limit that is set, where the prediction is known: "time", "memory",
            "energy".
        within_s: the seconds that the deadline must leave room for.
    """

    choice: Choice
    predicted: RoundCost
    shares: dict[str, float]
    within_s: float

    @property
    def share(self) -> float:
        """The share of the limit that binds: above 1 the choice does not fit; 0 when nothing known is
        limited.
        """
        return max(self.shares.values(), default=0.0)

    @property
    def binds(self) -> str | None:
        """The limit that is nearest, or exceeded most; None when nothing known is limited."""
        return max(self.shares, key=lambda limit: self.shares[limit], default=None)


@dataclass(frozen=True)
class Decision:
    """What was decided.

    Attributes:
        choice: None: nothing fits, the device declines.
        reason: why, in one line.
        predicted: what a round should take; when nothing fits, what a round at the smallest ratio would.
    """

    choice: Choice | None
    reason: str
    predicted: RoundCost

    def told(self, report: DeviceReport) -> DeviceReport:
        """`report` with what was chosen; where nothing fits, with the reason and the ratio of before."""
        if self.choice is None:
            return replace(report, reason=self.reason)
        ratio, seconds = self.choice.ratio, self.predicted.round_s
        return replace(report, ratio=ratio, reason=self.reason, round_s=seconds)


def explain_table(
    choices: Sequence[Choice], forecast: Forecast, limits: Limits, within: Within = no_margin
) -> list[Verdict]:
    """Every choice held against the limits, in the order given, ascending by ratio."""
    least = min((choice.ratio for choice in choices), default=0.0)
    margins = (no_margin if choice.ratio == least else within for choice in choices)
    return [
        _weigh(choice, forecast(choice), limits, margin)
        for choice, margin in zip(choices, margins, strict=True)
    ]


def decide(
    choices: Sequence[Choice],
    forecast: Forecast,
    limits: Limits,
    *,
    wanted: float,
    current: float | None = None,
    within: Within = no_margin,
) -> Decision:
    """The largest choice that is wanted and fits.

    Args:
        choices: ascending by ratio, at least one.
        forecast: what a round at a choice would take.
        limits: on it.
        wanted: no larger ratio than this, unless the method offers none.
        current: the ratio that the device runs at; None: it has not chosen one yet.
        within: how long a round may well take.
    """
    wished = [choice for choice in choices if choice.ratio <= wanted + 1e-9] or list(choices[:1])
    verdicts = explain_table(wished, forecast, limits, within)
    larger = None
    for verdict in reversed(verdicts):
        grows = current is not None and verdict.choice.ratio > current + 1e-9
        if verdict.share <= (SPARE if grows else 1):
            return Decision(verdict.choice, _why(verdict, larger, limits), verdict.predicted)
        larger = verdict
    return Decision(None, f"nothing fits: {_too_much(verdicts[0], limits)}", verdicts[0].predicted)


def affordable(
    choices: Sequence[Choice],
    forecast: ForecastOfWork,
    limits: Limits,
    *,
    wanted: float,
    least_work: float = 1.0,
    most_work: float = 1.0,
    values: Sequence[float] = (1.0,),
    within: Within = no_margin,
) -> tuple[RatioCandidate, ...]:
    """Every choice that is wanted and fits, if need be with a share of local training, or with an encoding of
    fewer bytes, ascending by ratio, with what a round at it would take.

    `values`: the bytes that the update's values take in each encoding that may be proposed, as a share of
    those in the first, by which `choices` are priced. The other arguments are as `decide` has them.
    """
    wished = [choice for choice in choices if choice.ratio <= wanted + 1e-9] or list(choices[:1])
    shares = [share for share in reversed(LOCAL_WORKS) if least_work <= share <= most_work] or [1.0]
    ways = [(share, uplink) for share in shares for uplink in range(len(values))]
    found = []
    for choice in wished:
        for share, uplink in ways:
            margin = no_margin if choice == wished[0] and (share, uplink) == ways[-1] else within
            sending = choice.sending(values[uplink], uplink) if uplink else choice
            if _weigh(sending, forecast(sending, share), limits, margin).share <= 1:
                found.append(_affordable(choice, forecast, share, uplink, len(shares) > 1, len(values) > 1))
                break
    return tuple(found)


def _affordable(
    choice: Choice,
    forecast: ForecastOfWork,
    share: float,
    uplink: int,
    tells_local_work: bool,
    tells_values: bool,
) -> RatioCandidate:
    once = forecast(choice, 1.0)
    twice = forecast(choice, 2.0) if tells_local_work else None
    empty = forecast(choice.sending(0.0), 1.0) if tells_values else None

    def between(less: float | None, more: float | None) -> float | None:
        return None if less is None or more is None else in_short(max(0.0, more - less))

    return RatioCandidate(
        ratio=choice.ratio,
        round_s=None if once.round_s is None else in_short(once.round_s),
        bytes_up=once.bytes_up,
        joules=None if once.joules is None else in_short(once.joules),
        local_s=None if twice is None else between(once.round_s, twice.round_s),
        local_joules=None if twice is None else between(once.joules, twice.joules),
        local_work=share,
        uplink=uplink,
        values_up=None if empty is None else (once.bytes_up or 0) - (empty.bytes_up or 0),
        values_s=None if empty is None else between(empty.round_s, once.round_s),
        values_joules=None if empty is None else between(empty.joules, once.joules),
    )


def in_short(figure: float) -> float:
    """In four digits, which halves what a report takes on the wire; no forecast knows more of them."""
    return float(f"{figure:.4g}")


def _weigh(choice: Choice, predicted: RoundCost, limits: Limits, within: Within) -> Verdict:
    within_s = within(predicted)
    pairs = {
        "time": (within_s, limits.deadline_s),
        "memory": (predicted.memory_bytes, limits.memory_bytes),
        "energy": (predicted.joules, limits.joules),
    }
    shares = {
        name: amount / limit if limit else float("inf")
        for name, (amount, limit) in pairs.items()
        if amount is not None and limit is not None
    }
    return Verdict(choice, predicted, shares, within_s)


def _why(verdict: Verdict, larger: Verdict | None, limits: Limits) -> str:
    ratio, predicted = verdict.choice.ratio, verdict.predicted
    if larger is not None:
        spare = f", less than {100 - 100 * SPARE:g} % to spare" if larger.share <= 1 else ""
        return f"p = {ratio:g}: {_too_much(larger, limits)}{spare}"
    unknown = [part for part, seconds in _parts(predicted).items() if seconds is None]
    note = f", {' and '.join(unknown)} unknown" if unknown else ""
    return f"p = {ratio:g}: as wanted; takes {_amount(predicted.known_s, limits.deadline_s, 's')}{note}"


def _too_much(verdict: Verdict, limits: Limits) -> str:
    ratio, predicted = verdict.choice.ratio, verdict.predicted
    match verdict.binds:
        case "memory":
            assert predicted.memory_bytes is not None
            assert limits.memory_bytes is not None
            needs = _amount(predicted.memory_bytes / 1e6, limits.memory_bytes / 1e6, "MB")
        case "energy":
            assert predicted.joules is not None
            needs = _amount(predicted.joules, limits.joules, "J")
        case _:
            margin = verdict.within_s / predicted.known_s - 1 if predicted.known_s else 0.0
            noted = f", with {100 * margin:.0f} % for noise" if margin > 0.005 else ""
            needs = f"{_amount(verdict.within_s, limits.deadline_s, 's')} ({_longest(predicted)}{noted})"
    return f"{ratio:g} would need {needs}"


def _longest(predicted: RoundCost) -> str:
    """The part of the round that takes longest, a transfer with its speed."""
    known = {part: seconds for part, seconds in _parts(predicted).items() if seconds is not None}
    part = max(known, key=lambda name: known[name])
    num_bytes = {"download": predicted.bytes_down, "upload": predicted.bytes_up}.get(part)
    speed = f" at {_figure(num_bytes * 8 / known[part] / 1e6)} Mbit/s" if num_bytes and known[part] else ""
    return f"{part} {_figure(known[part])} s{speed}"


def _parts(predicted: RoundCost) -> dict[str, float | None]:
    return {
        "download": predicted.download_s,
        "training": predicted.train_s,
        "upload": predicted.upload_s,
    }


def _amount(amount: float, limit: float | None, unit: str) -> str:
    """The amount and its limit in three digits, or in as many as it takes to tell them apart."""
    if limit is None:
        return f"{_figure(amount)} {unit}"
    digits = next((n for n in (3, 4, 5) if _figure(amount, n) != _figure(limit, n)), 6)
    return f"{_figure(amount, digits)} {unit} of {_figure(limit, digits)} {unit}"


def _figure(value: float, digits: int = 3) -> str:
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"
