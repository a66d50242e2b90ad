"""Chooses the ratio of a device: the largest whose round fits every limit.

A real agent and a simulated device use the same rule:

    forecast = partial(predict, capability=capability, cost_history=cost_history)
    decision = decide(method.choices(report), forecast, limits_of(...), wanted=1.0, current=report.ratio)
    cost_history = cost_history.learned(demand(decision.choice, capability), actual)  # after the round

An unknown cost does not limit the ratio, and the reason says so. More bandwidth, memory, time or energy
never gives a smaller ratio. To avoid oscillation, a device changes to a larger ratio than its `current` one
only if that leaves `1 - SPARE` of every limit unused. Time can have a safety margin, except at the smallest
ratio, because a late reply is better than none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fleetune.edge_agent.budget.owner_policy import Limits
from fleetune.protocols.method.choice import Choice, DeviceReport
from fleetune.protocols.round_cost import RoundCost

SPARE = 0.95  # largest share of each limit that a ratio above the current one may use

Forecast = Callable[[Choice], RoundCost]
Margin = Callable[[RoundCost], float]
"""A function that returns the seconds that a deadline must allow for a predicted round, see `safety_margin`.
"""


def no_margin(predicted: RoundCost) -> float:
    """Return the predicted seconds without a margin."""
    return predicted.known_s


@dataclass(frozen=True)
class LimitCheck:
    """One choice compared with the limits.

    Attributes:
        choice: the ratio and its cost.
        predicted: predicted cost of a round.
        shares: used share of each limit with a known cost: "time", "memory", "energy".
        within_s: predicted seconds with the safety margin.
    """

    choice: Choice
    predicted: RoundCost
    shares: dict[str, float]
    within_s: float

    @property
    def share(self) -> float:
        """The largest share of a limit. Above 1 the choice does not fit; 0 if no known cost is limited."""
        return max(self.shares.values(), default=0.0)

    @property
    def binds(self) -> str | None:
        """The limit with the largest share; None if no known cost is limited."""
        return max(self.shares, key=lambda limit: self.shares[limit], default=None)


@dataclass(frozen=True)
class RatioDecision:
    """A device's ratio and the reason for it.

    Attributes:
        choice: None: nothing fits, and the device declines.
        reason: one line.
        predicted: predicted cost of a round, at the smallest ratio if nothing fits.
    """

    choice: Choice | None
    reason: str
    predicted: RoundCost

    def reported(self, report: DeviceReport) -> DeviceReport:
        """Return `report` with the choice and its reason, or with the earlier ratio if nothing fits."""
        if self.choice is None:
            return replace(report, reason=self.reason)
        ratio, seconds = self.choice.ratio, self.predicted.round_s
        return replace(report, ratio=ratio, reason=self.reason, round_s=seconds)


def wanted_choices(choices: Sequence[Choice], wanted: float) -> list[Choice]:
    """Return the choices up to the ratio `wanted`, or the smallest choice."""
    return [choice for choice in choices if choice.ratio <= wanted + 1e-9] or list(choices[:1])


def check_limits(
    choices: Sequence[Choice], forecast: Forecast, limits: Limits, margin: Margin = no_margin
) -> list[LimitCheck]:
    """Compare every choice with the limits, in the given order."""
    least = min((choice.ratio for choice in choices), default=0.0)
    return [
        check(choice, forecast(choice), limits, no_margin if choice.ratio == least else margin)
        for choice in choices
    ]


def check(choice: Choice, predicted: RoundCost, limits: Limits, margin: Margin) -> LimitCheck:
    """Compare one choice and its predicted cost with the limits."""
    within_s = margin(predicted)
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
    return LimitCheck(choice, predicted, shares, within_s)


def decide(
    choices: Sequence[Choice],
    forecast: Forecast,
    limits: Limits,
    *,
    wanted: float,
    current: float | None = None,
    margin: Margin = no_margin,
) -> RatioDecision:
    """Choose the largest ratio that is wanted and fits.

    Args:
        choices: at least one, ascending by ratio.
        forecast: predicts the cost of a round at a choice.
        limits: limits of a round.
        wanted: largest ratio to choose, unless the method has only larger ones.
        current: the device's present ratio; None if it has not chosen one yet.
        margin: the safety margin in time.
    """
    checks = check_limits(wanted_choices(choices, wanted), forecast, limits, margin)
    larger = None
    for one in reversed(checks):
        grows = current is not None and one.choice.ratio > current + 1e-9
        if one.share <= (SPARE if grows else 1):
            return RatioDecision(one.choice, _why(one, larger, limits), one.predicted)
        larger = one
    return RatioDecision(None, f"nothing fits: {_too_much(checks[0], limits)}", checks[0].predicted)


def _why(checked: LimitCheck, larger: LimitCheck | None, limits: Limits) -> str:
    ratio, predicted = checked.choice.ratio, checked.predicted
    if larger is not None:
        spare = f", less than {100 - 100 * SPARE:g} % to spare" if larger.share <= 1 else ""
        return f"p = {ratio:g}: {_too_much(larger, limits)}{spare}"
    unknown = [part for part, seconds in _parts(predicted).items() if seconds is None]
    note = f", {' and '.join(unknown)} unknown" if unknown else ""
    return f"p = {ratio:g}: as wanted; takes {_amount(predicted.known_s, limits.deadline_s, 's')}{note}"


def _too_much(checked: LimitCheck, limits: Limits) -> str:
    ratio, predicted = checked.choice.ratio, checked.predicted
    match checked.binds:
        case "memory":
            assert predicted.memory_bytes is not None
            assert limits.memory_bytes is not None
            needs = _amount(predicted.memory_bytes / 1e6, limits.memory_bytes / 1e6, "MB")
        case "energy":
            assert predicted.joules is not None
            needs = _amount(predicted.joules, limits.joules, "J")
        case _:
            margin = checked.within_s / predicted.known_s - 1 if predicted.known_s else 0.0
            noted = f", with {100 * margin:.0f} % for noise" if margin > 0.005 else ""
            needs = f"{_amount(checked.within_s, limits.deadline_s, 's')} ({_longest(predicted)}{noted})"
    return f"{ratio:g} would need {needs}"


def _longest(predicted: RoundCost) -> str:
    """Return the longest part of a round as text, with the bandwidth if it is a transfer."""
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
    """Return the amount and its limit as text, with three digits or as many as show a difference."""
    if limit is None:
        return f"{_figure(amount)} {unit}"
    digits = next((n for n in (3, 4, 5) if _figure(amount, n) != _figure(limit, n)), 6)
    return f"{_figure(amount, digits)} {unit} of {_figure(limit, digits)} {unit}"


def _figure(value: float, digits: int = 3) -> str:
    return f"{value:.0f}" if value >= 10**digits else f"{value:.{digits}g}"
