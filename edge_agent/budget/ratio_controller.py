"""The ratio of one device in one run: predicts, decides, and learns from measured rounds.

A real agent and a simulated device use the same code, without I/O or a clock.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import overload

import msgspec
from msgspec import UNSET, Struct, structs

from fleetune.edge_agent.budget.cost_forecast import Capability, demand, predict
from fleetune.edge_agent.budget.cost_history import CostHistory
from fleetune.edge_agent.budget.owner_policy import Limits, Policy, limits_of
from fleetune.edge_agent.budget.ratio_choice import (
    LimitCheck,
    Margin,
    RatioDecision,
    check,
    check_limits,
    decide,
    no_margin,
    wanted_choices,
)
from fleetune.edge_agent.budget.safety_margin import (
    ForecastError,
    censored_error,
    forecast_error,
    observed_parts,
    seconds_with_margin,
)
from fleetune.firmware_profiles import UNKNOWN, Board
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import LOCAL_WORKS, Budget, Choice, DeviceReport, RatioCandidate
from fleetune.protocols.round_cost import RoundCost

GREW = 1.25  # A new report is sent if the number of samples changed by this factor.
MOVED = 0.1  # A new report is sent if the predicted seconds changed by this share.


class RatioController(Struct, frozen=True):
    """A device's ratio and everything that decides it.

    Attributes:
        choices: the method's choices, ascending by ratio.
        capability: the device before its first round.
        board: the board's profile.
        policy: the owner's policy.
        deadline_s: deadline of a round; None for no limits, because the choice is made elsewhere.
        report: report with the current ratio, or with the last one that fitted.
        predicted: predicted cost of a round.
        cost_history: past rounds.
        fits: True if any ratio fits.
        proposed: True if the coordinator proposes the ratio of each task, from the reported candidates.
        least_work, most_work: range of local training that it may propose.
        late: share of rounds that may exceed the deadline; None for no safety margin.
        values: for each encoding that a task may ask for, the bytes of an update's values relative to the
            first encoding, by which `choices` are priced.
    """

    choices: Sequence[Choice]
    capability: Capability
    board: Board
    policy: Policy
    deadline_s: float | None
    report: DeviceReport
    predicted: RoundCost = RoundCost()
    cost_history: CostHistory = CostHistory()
    fits: bool = True
    proposed: bool = False
    least_work: float = 1.0
    most_work: float = 1.0
    late: float | None = None
    values: tuple[float, ...] = (1.0,)

    def chosen(self, conditions: Conditions) -> "RatioController":
        """Return the controller after a new decision: when the device joins the run, and after each round."""
        decision = self.decision(conditions)
        report = decision.reported(replace(self.report, conditions=conditions))
        fits = decision.choice is not None
        if self.proposed:
            affords = self._candidates(conditions)
            values = tuple(map(_rounded, self.values)) if len(self.values) > 1 else UNSET
            idle_w = UNSET if self.board.name == UNKNOWN else self.board.idle_w
            report = replace(report, affords=affords, values=values, idle_w=idle_w)
            if affords and not fits:  # with less local training or fewer bytes
                report, fits = self._in_part(report, affords[0]), True
        return structs.replace(self, report=report, predicted=decision.predicted, fits=fits)

    def _in_part(self, report: DeviceReport, least: RatioCandidate) -> DeviceReport:
        """Return the report of a device for which only less local training or a smaller encoding fits."""
        budget = Budget(least.ratio, least.local_work, least.uplink)
        parts = [f"{least.local_work:.0%} of local training"] if least.local_work != 1 else []
        parts += ["a smaller encoding of its values"] if least.uplink else []
        reason = f"{report.reason}; it fits with {' and '.join(parts)}"
        round_s = self._forecast(self._choice(budget), least.local_work).round_s
        return replace(report, ratio=least.ratio, reason=reason, round_s=round_s)

    def decision(self, conditions: Conditions) -> RatioDecision:
        """Return the ratio under these conditions, and the reason for it."""
        chosen_before = bool(self.report.reason) and self.fits
        return decide(
            self.choices,
            self._forecast,
            self.limits(conditions),
            wanted=self.policy.ratio or 1.0,
            current=self.report.ratio if chosen_before else None,
            margin=self.margin,
        )

    def _candidates(self, conditions: Conditions) -> tuple[RatioCandidate, ...]:
        """Return the ratios that fit, ascending, each with the most local training and bytes that fit."""
        limits, wanted = self.limits(conditions), wanted_choices(self.choices, self.policy.ratio or 1.0)
        in_range = [share for share in reversed(LOCAL_WORKS) if self.least_work <= share <= self.most_work]
        options = [(share, uplink) for share in in_range or [1.0] for uplink in range(len(self.values))]
        found = []
        for choice in wanted:
            for share, uplink in options:
                smallest = choice == wanted[0] and (share, uplink) == options[-1]
                sending = choice.sending(self.values[uplink], uplink) if uplink else choice
                predicted = self._forecast(sending, share)
                if check(sending, predicted, limits, no_margin if smallest else self.margin).share <= 1:
                    found.append(self._candidate(choice, share, uplink, trains_less=len(in_range) > 1))
                    break
        return tuple(found)

    def _candidate(
        self, choice: Choice, local_work: float, uplink: int, *, trains_less: bool
    ) -> RatioCandidate:
        """Return `choice` with its costs, and the parts of them that local training and values take."""
        once = self._forecast(choice)
        twice = self._forecast(choice, 2.0) if trains_less else RoundCost()
        empty = self._forecast(choice.sending(0.0)) if len(self.values) > 1 else None
        return RatioCandidate(
            ratio=choice.ratio,
            round_s=_rounded(once.round_s),
            bytes_up=once.bytes_up,
            joules=_rounded(once.joules),
            local_s=_difference(twice.round_s, once.round_s),
            local_joules=_difference(twice.joules, once.joules),
            local_work=local_work,
            uplink=uplink,
            values_up=None if empty is None else (once.bytes_up or 0) - (empty.bytes_up or 0),
            values_s=None if empty is None else _difference(once.round_s, empty.round_s),
            values_joules=None if empty is None else _difference(once.joules, empty.joules),
        )

    def within(self, proposed: Budget) -> Budget:
        """Return the closest candidate that does not exceed `proposed`.

        If none fits, it is the smallest ratio with all of the proposed local training.
        """
        uplink = min(proposed.uplink, len(self.values) - 1)
        affords = self.report.affords or ()
        fitting = [one for one in affords if one.ratio <= proposed.ratio + 1e-9] or affords[:1]
        if not fitting:
            return Budget(self.choices[0].ratio, proposed.local_work, uplink)
        most = fitting[-1]
        return Budget(most.ratio, min(most.local_work, proposed.local_work), max(most.uplink, uplink))

    def expected(self, budget: Budget) -> RoundCost:
        """Return the predicted cost of a round."""
        if budget == Budget(self.report.ratio):
            return self.predicted
        return self._forecast(self._choice(budget), budget.local_work)

    def limits(self, conditions: Conditions) -> Limits:
        """Return the limits of a round under these conditions."""
        if self.deadline_s is None:
            return Limits()
        return limits_of(self.deadline_s, conditions, self.policy, self.board)

    def explained(self, conditions: Conditions) -> list[LimitCheck]:
        """Return every choice compared with the limits."""
        return check_limits(self.choices, self._forecast, self.limits(conditions), self.margin)

    def trains_until_s(self, budget: Budget, taken_s: float, span_s: float | None = None) -> float | None:
        """Return the seconds after the task's arrival when local training must stop to meet the deadline.

        Args:
            budget: budget of the round.
            taken_s: seconds from the start of the round to the task's arrival.
            span_s: duration of the round, if the task gives it. The deadline limits it.

        Returns:
            The seconds; None for no limit, because the coordinator does not accept partial local training.
        """
        if self.least_work == self.most_work == 1 or self.deadline_s is None:
            return None
        rest = structs.replace(self.expected(replace(budget, local_work=0.0)), download_s=None)
        given_s = self.deadline_s if span_s is None else min(span_s, self.deadline_s)
        return max(0.0, given_s - taken_s - self.margin(rest))

    @property
    def margin(self) -> Margin:
        """The safety margin in time."""
        if self.late is None:
            return no_margin
        return partial(seconds_with_margin, errors=self.cost_history.errors, late=self.late)

    def learned(self, budget: Budget, actual: RoundCost) -> "RatioController":
        """Return the controller after a complete round."""
        error = None if self.late is None else forecast_error(self.expected(budget), actual)
        return self._after(budget, actual, error)

    def given_up(self, budget: Budget, begun: RoundCost, elapsed_s: float) -> "RatioController":
        """Return the controller after a round that was cancelled before its reply had arrived.

        Without a safety margin such a round is ignored.
        """
        if self.late is None:
            return self
        known_s = min(elapsed_s, self.deadline_s or math.inf)  # Nothing is learned beyond the deadline.
        predicted = self.expected(budget)
        error = censored_error(predicted, begun, known_s)
        return self._after(budget, observed_parts(predicted, begun, known_s), error)

    def _after(self, budget: Budget, actual: RoundCost, error: ForecastError | None) -> "RatioController":
        asked = demand(self._choice(budget), self.capability, budget.local_work)
        return structs.replace(self, cost_history=self.cost_history.learned(asked, actual, error))

    def declining(self) -> "RatioController":
        """Return the controller after a round in which no choice fitted, see `CostHistory.declining`."""
        return structs.replace(self, cost_history=self.cost_history.declining())

    def holding(self, num_samples: int, new_samples: int, drift: float | None) -> "RatioController":
        """Return the controller after the device's data changed, see `DeviceReport`."""
        capability = replace(self.capability, num_samples=num_samples)
        report = replace(
            self.report,
            num_samples=num_samples,
            new_samples=new_samples,
            drift=UNSET if drift is None else drift,
        )
        return structs.replace(self, capability=capability, report=report)

    def is_news(self, before: DeviceReport, moved: float = MOVED) -> bool:
        """True if the report differs enough from `before` to be sent again.

        That is the case with other data, another ratio or candidate, or predicted seconds that changed by the
        share `moved`.
        """
        if _has_grown(self.report, before) or _moved(_affords(self.report), _affords(before), moved):
            return True
        now, then = self.report.round_s, before.round_s
        if self.report.ratio != before.ratio or (now is None) != (then is None):
            return True
        return now is not None and then is not None and abs(now - then) > moved * then

    def encoded(self) -> bytes:
        """Return the bytes to store, for `read_ratio_controller`."""
        return msgspec.msgpack.encode(self)

    def _choice(self, budget: Budget) -> Choice:
        choice = next(one for one in self.choices if one.ratio == budget.ratio)
        return choice.sending(self.values[budget.uplink], budget.uplink) if budget.uplink else choice

    def _forecast(self, choice: Choice, local_work: float = 1.0) -> RoundCost:
        return predict(choice, self.capability, self.cost_history, local_work)


def _difference(more: float | None, less: float | None) -> float | None:
    return None if less is None or more is None else _rounded(max(0.0, more - less))


@overload
def _rounded(figure: float) -> float: ...
@overload
def _rounded(figure: None) -> None: ...
def _rounded(figure: float | None) -> float | None:
    """Round to four digits: more than a forecast's accuracy, and half the bytes in a report."""
    return None if figure is None else float(f"{figure:.4g}")


def _has_grown(now: DeviceReport, then: DeviceReport) -> bool:
    """True if the number of samples changed by a quarter or more, or the drift alarm changed."""
    for new, old in ((now.num_samples, then.num_samples), (now.new_samples, then.new_samples)):
        if isinstance(new, int) and isinstance(old, int):
            if not old / GREW <= new <= old * GREW:
                return True
        elif isinstance(new, int):
            return True
    return _alarms(now) != _alarms(then)


def _affords(report: DeviceReport) -> dict[float, float | None]:
    affords = () if report.affords is UNSET else report.affords
    return {one.ratio: one.round_s for one in affords}


def _moved(now: dict[float, float | None], then: dict[float, float | None], moved: float) -> bool:
    """True if other ratios fit, or the predicted seconds of the smallest ratio changed."""
    if now.keys() != then.keys():
        return True
    first, before = next(iter(now.values()), None), next(iter(then.values()), None)
    return first is not None and before is not None and abs(first - before) > moved * before


def _alarms(report: DeviceReport) -> bool:
    return isinstance(report.drift, float) and report.drift >= 1


def read_ratio_controller(data: bytes | None) -> RatioController | None:
    """Return the stored controller; None if it is missing, damaged or of another format.

    Without it, the device learns its costs again.
    """
    try:
        return msgspec.msgpack.decode(data, type=RatioController) if data else None
    except (msgspec.DecodeError, ValueError):
        return None
