"""What a device can afford in one run, round after round: it predicts, learns from what rounds took, chooses
again.

The same for a real agent and for a simulated one: no I/O, no clock.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import msgspec
from msgspec import UNSET, Struct, field, structs

from fleetune.edge_agent.budget.cost_forecast import Capability, demand, predict
from fleetune.edge_agent.budget.cost_history import CostHistory
from fleetune.edge_agent.budget.owner_policy import Limits, Policy, limits_of
from fleetune.edge_agent.budget.ratio_choice import (
    Decision,
    Verdict,
    Within,
    affordable,
    decide,
    explain_table,
    in_short,
    no_margin,
)
from fleetune.edge_agent.budget.safety_margin import (
    RoundError,
    error_of,
    error_of_given_up,
    late_within,
    over_before_its_end,
)
from fleetune.firmware_profiles import UNKNOWN, Board
from fleetune.protocols.conditions import Conditions
from fleetune.protocols.method.choice import Budget, Choice, DeviceReport, RatioCandidate
from fleetune.protocols.round_cost import RoundCost

GREW = 1.25  # samples, before a report is news
MOVED = 0.1  # a changed forecast of the round's seconds is worth a new report


class RatioController(Struct, frozen=True):
    """The ratio that a device runs at, and all that decides it.

    Attributes:
        choices: the method's, ascending by ratio.
        capability: what is known of the device before its first round.
        board: its profile.
        policy: of its owner.
        deadline_s: of a round; None: a choice was made elsewhere, nothing limits it.
        report: with the ratio it runs at, or ran at before nothing fitted.
        predicted: what a round is expected to take.
        cost_history: of past rounds.
        fits: whether there is a ratio that this device can afford.
        proposed: the coordinator proposes the ratios of tasks, by what the report says that fits.
        least_work, most_work: and how much of the local training, within these.
        late: share of rounds that may take longer than the deadline; None: time has no margin.
        values: the bytes that an update's values take in each encoding that a task may ask for, as a share of
            those in the first, by which `choices` are priced.
    """

    choices: Sequence[Choice]
    capability: Capability
    board: Board
    policy: Policy
    deadline_s: float | None
    report: DeviceReport
    predicted: RoundCost = RoundCost()
    cost_history: CostHistory = field(default=CostHistory(), name="experience")
    fits: bool = True
    proposed: bool = False
    least_work: float = 1.0
    most_work: float = 1.0
    late: float | None = None
    values: tuple[float, ...] = (1.0,)

    def chosen(self, conditions: Conditions) -> "RatioController":
        """Choose a ratio by what is known now: first when the run is joined, then after each round."""
        decision = self.decision(conditions)
        report = decision.told(replace(self.report, conditions=conditions))
        fits = decision.choice is not None
        if self.proposed:
            affords = self._affords(conditions)
            values = tuple(map(in_short, self.values)) if len(self.values) > 1 else UNSET
            idle_w = UNSET if self.board.name == UNKNOWN else self.board.idle_w
            report = replace(report, affords=affords, values=values, idle_w=idle_w)
            if affords and not fits:  # with less local training, or a thin update, it does
                report, fits = self._in_part(report, affords[0]), True
        return structs.replace(self, report=report, predicted=decision.predicted, fits=fits)

    def _in_part(self, report: DeviceReport, least: RatioCandidate) -> DeviceReport:
        """The report of a device that can do a part of the local training, or send a thin update, alone."""
        budget = Budget(least.ratio, least.local_work, least.uplink)
        parts = [f"{least.local_work:.0%} of local training"] if least.local_work != 1 else []
        parts += ["fewer bytes for its values"] if least.uplink else []
        reason = f"{report.reason}; with {' and '.join(parts)} it fits"
        round_s = self._forecast(self._choice(budget), least.local_work).round_s
        return replace(report, ratio=least.ratio, reason=reason, round_s=round_s)

    def decision(self, conditions: Conditions) -> Decision:
        """The ratio by what is known now, and why."""
        chosen_before = bool(self.report.reason) and self.fits
        return decide(
            self.choices,
            self._forecast,
            self.limits(conditions),
            wanted=self.policy.ratio or 1.0,
            current=self.report.ratio if chosen_before else None,
            within=self.may_take,
        )

    def _affords(self, conditions: Conditions) -> tuple[RatioCandidate, ...]:
        wanted, limits = self.policy.ratio or 1.0, self.limits(conditions)
        return affordable(
            self.choices,
            self._forecast,
            limits,
            wanted=wanted,
            least_work=self.least_work,
            most_work=self.most_work,
            values=self.values,
            within=self.may_take,
        )

    def within(self, proposed: Budget) -> Budget:
        """What is affordable and no more than `proposed`; the smallest ratio, and all of the local training
        that is proposed, where nothing is.
        """
        uplink = min(proposed.uplink, len(self.values) - 1)
        affords = self.report.affords or ()
        fitting = [one for one in affords if one.ratio <= proposed.ratio + 1e-9] or affords[:1]
        if not fitting:
            return Budget(self.choices[0].ratio, proposed.local_work, uplink)
        most = fitting[-1]
        return Budget(most.ratio, min(most.local_work, proposed.local_work), max(most.uplink, uplink))

    def expected(self, budget: Budget) -> RoundCost:
        """What a round at one of the choices is expected to take."""
        if budget == Budget(self.report.ratio):
            return self.predicted
        return self._forecast(self._choice(budget), budget.local_work)

    def limits(self, conditions: Conditions) -> Limits:
        """The limits on a round under these conditions."""
        if self.deadline_s is None:
            return Limits()
        return limits_of(self.deadline_s, conditions, self.policy, self.board)

    def explained(self, conditions: Conditions) -> list[Verdict]:
        """Every choice held against the limits."""
        return explain_table(self.choices, self._forecast, self.limits(conditions), self.may_take)

    def trains_until_s(self, budget: Budget, taken_s: float, span_s: float | None = None) -> float | None:
        """How long after its task is here, in a round that would be late, local training may go on; None: as
        long as it takes, since it does all of what it is asked for or nothing.

        Args:
            budget: of the round.
            taken_s: seconds that the round has taken when the task is here.
            span_s: that the round is given, where that is said; it is over no later than its deadline.
        """
        if self.least_work == self.most_work == 1 or self.deadline_s is None:
            return None
        rest = structs.replace(self.expected(replace(budget, local_work=0.0)), download_s=None)
        given_s = self.deadline_s if span_s is None else min(span_s, self.deadline_s)
        return max(0.0, given_s - taken_s - self.may_take(rest))

    @property
    def may_take(self) -> Within:
        """Seconds that a round of a forecast may well take, see `time_margin`."""
        if self.late is None:
            return no_margin
        return partial(late_within, errors=self.cost_history.errors, late=self.late)

    def learned(self, budget: Budget, actual: RoundCost) -> "RatioController":
        """The controller after a round that was done to its end at one of the choices."""
        error = None if self.late is None else error_of(self.expected(budget), actual)
        return self._after(budget, actual, error)

    def given_up(self, budget: Budget, begun: RoundCost, elapsed_s: float) -> "RatioController":
        """The controller after a round that was over before its reply had arrived, see `over_before_its_end`.

        Where time has no margin it teaches nothing, as ever.
        """
        if self.late is None:
            return self
        known_s = min(elapsed_s, self.deadline_s or math.inf)  # later than late is no matter
        expected = self.expected(budget)
        error = error_of_given_up(expected, begun, known_s)
        return self._after(budget, over_before_its_end(expected, begun, known_s), error)

    def _after(self, budget: Budget, actual: RoundCost, error: RoundError | None) -> "RatioController":
        asked = demand(self._choice(budget), self.capability, budget.local_work)
        return structs.replace(self, cost_history=self.cost_history.learned(asked, actual, error))

    def declining(self) -> "RatioController":
        """The controller after a while in which nothing fitted, see `CostHistory.declining`."""
        return structs.replace(self, cost_history=self.cost_history.declining())

    def holding(self, num_samples: int, new_samples: int, drift: float | None) -> "RatioController":
        """The controller of a device whose data grow, with what it holds now, see `DeviceReport`."""
        capability = replace(self.capability, num_samples=num_samples)
        report = replace(
            self.report,
            num_samples=num_samples,
            new_samples=new_samples,
            drift=UNSET if drift is None else drift,
        )
        return structs.replace(self, capability=capability, report=report)

    def is_news(self, before: DeviceReport, moved: float = MOVED) -> bool:
        """Whether the coordinator, which knows the report `before`, should hear of the present one, because
        its data grew, its ratio changed or its forecast of the round moved by this share.
        """
        if _has_grown(self.report, before) or _moved(_affords(self.report), _affords(before), moved):
            return True
        now, then = self.report.round_s, before.round_s
        if self.report.ratio != before.ratio or (now is None) != (then is None):
            return True
        return now is not None and then is not None and abs(now - then) > moved * then

    def encoded(self) -> bytes:
        """As bytes to be stored, which `read_ratio_controller` reads."""
        return msgspec.msgpack.encode(self)

    def _choice(self, budget: Budget) -> Choice:
        choice = next(one for one in self.choices if one.ratio == budget.ratio)
        return choice.sending(self.values[budget.uplink], budget.uplink) if budget.uplink else choice

    def _forecast(self, choice: Choice, local_work: float = 1.0) -> RoundCost:
        return predict(choice, self.capability, self.cost_history, local_work)


def _has_grown(now: DeviceReport, then: DeviceReport) -> bool:
    """Whether a device's data are not what they were: a quarter more or less, or of another kind."""
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
    """Whether other ratios fit, or the seconds of the quickest are worth a new report."""
    if now.keys() != then.keys():
        return True
    first, before = next(iter(now.values()), None), next(iter(then.values()), None)
    return first is not None and before is not None and abs(first - before) > moved * before


def _alarms(report: DeviceReport) -> bool:
    return isinstance(report.drift, float) and report.drift >= 1


def read_ratio_controller(data: bytes | None) -> RatioController | None:
    """Read what `RatioController.encoded` made; None: there is nothing, or it is damaged.

    What is lost is soon learned again.
    """
    try:
        return msgspec.msgpack.decode(data, type=RatioController) if data else None
    except (msgspec.DecodeError, ValueError):
        return None
