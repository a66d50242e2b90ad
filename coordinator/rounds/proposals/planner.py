"""Chooses the budget of each participant's task, in runs with an objective (`[objective] minimise`).

A device reports its candidates: the ratios that fit its limits and its owner's policy, and the cost of a
round at each ratio (`DeviceReport.affords`). For each task the coordinator chooses a ratio, a share (or a
multiple) of the local training and an encoding of the update. It first narrows the options:

    time           options within the target round duration (`target_duration`)
    bytes          options that send no more than the one with the highest utility per byte. If most
                   devices run on batteries, only options within the target duration, because waiting
                   drains batteries
    energy         likewise per joule. If boards report their idle power, only options within the duration
                   that costs the whole fleet least for its utility (`idle_energy`)

Then it takes the option with the highest utility (`CandidatePlan.utility`).

A device's reported seconds can raise the target only up to its limits, which fit the run's deadline. A device
that reports no candidates chooses its ratio itself, and the round waits for it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.proposals.candidate_plans import (
    CandidatePlan,
    Plans,
    Utility,
    candidate_plans,
)
from fleetune.coordinator.rounds.proposals.idle_energy import idle_cost, within_cheapest_duration
from fleetune.coordinator.rounds.proposals.target_duration import within_target_duration
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.method.utility import default_utility
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.update.encodings.encoding import EncodingCost


@dataclass(frozen=True)
class Planner:
    """Chooses task budgets for the objective of one run.

    Attributes:
        objective: the run's section [objective].
        uplinks: cost of each encoding of updates (`Enrolment.uplinks`); () if the run has only one.
        utility: utility of a device's round, see `Method.utility`.
    """

    objective: ObjectiveSection = ObjectiveSection()  # noqa: RUF009 - frozen
    uplinks: tuple[EncodingCost, ...] = ()
    utility: Utility = default_utility

    def assign(self, state: EngineState, participants: Sequence[DeviceId]) -> None:
        """Record in `state` the budget of each participant's task, where the objective proposes a budget."""
        if not self.objective.proposes:
            return
        plans = self.candidates(state, participants)
        reports = [state.members[device].report for device, some in plans.items() if not some]
        fixed_s = max((report.round_s or 0.0 for report in reports if report), default=0.0)
        for device, some in sorted(self.worthwhile(state, reporting(plans), fixed_s).items()):
            budget, member = most_useful(some).budget, state.members[device]
            same = member.at_work is not None and member.at_work.ratio == budget.ratio
            state.put(device, assigned=budget, admitted=member.admitted and same)

    def learn(self, state: EngineState) -> None:
        """Add to `state` the compression errors that a closing round's replies report."""
        reported: dict[int, list[float]] = {}
        for device in state.replied:
            member = state.members[device]
            if member.assigned and member.observed.compression_error is not None:
                reported.setdefault(member.assigned.uplink, []).append(member.observed.compression_error)
        if self.uplinks and (reported or state.compression_errors.shares):
            state.change(compression_errors=state.compression_errors.after(reported, self.uplinks))

    def candidates(self, state: EngineState, devices: Collection[DeviceId]) -> dict[DeviceId, Plans]:
        """Return the options of each device; () for a device that reports none."""
        factors = state.compression_errors.utility_factors(self.uplinks)
        return {
            device: candidate_plans(state.members[device], self.objective, factors, self.utility)
            for device in devices
        }

    def worthwhile(
        self, state: EngineState, plans: Mapping[DeviceId, Plans], fixed_s: float = 0.0
    ) -> dict[DeviceId, Plans]:
        """Return the options of each device whose utility is worth their cost; at least one for each device.

        `fixed_s`: lower bound of the round's duration.
        """
        if self.objective.minimise == "time":
            return within_target_duration(plans, fixed_s)
        idle = idle_cost(state, plans, self.objective)
        if idle is not None:
            return within_cheapest_duration(plans, self.objective, idle, fixed_s)
        cheap = {device: cost_efficient(some, self.objective) for device, some in plans.items()}
        return within_target_duration(cheap, fixed_s) if _on_batteries(state, plans) else cheap


def reporting(plans: Mapping[DeviceId, Plans]) -> dict[DeviceId, Plans]:
    """Return the devices that report options, with these options."""
    return {device: some for device, some in plans.items() if some}


def most_useful(plans: Plans) -> CandidatePlan:
    """Return the option with the highest utility; of equals, the largest ratio, then the fewest bytes."""
    return max(reversed(plans), key=lambda one: (one.utility, one.budget.ratio, -(one.bytes_up or 0)))


def cost_efficient(plans: Plans, objective: ObjectiveSection) -> Plans:
    """Return the options that cost no more than the one with the highest utility per cost.

    If a cost is unknown, all options are returned.
    """
    costs = [cost for one in plans if (cost := one.cost(objective)) is not None]
    if len(costs) < len(plans):
        return plans
    priced = list(zip(plans, costs, strict=True))
    _, most = max((one.utility / cost if cost else 0.0, cost) for one, cost in priced)
    return [one for one, cost in priced if cost <= most]


def _on_batteries(state: EngineState, devices: Collection[DeviceId]) -> bool:
    """True if more than half of these devices run on batteries."""
    reports = [state.members[device].report for device in devices]
    drained = sum(report is not None and report.conditions.power == "battery" for report in reports)
    return 2 * drained > len(devices)
