"""Chooses the round duration that costs a fleet the least energy for its utility, idle boards included.

In a round of a given duration, a board draws the joules of its work, and idle power for the rest of the time.
So waiting for a device that works more efficiently can cost the other boards more than it saves. For each
possible duration, every device takes its option with the highest utility per cost, idle time included. The
cheapest duration has the highest ratio of utility to cost. The utility is the geometric mean over the fleet,
as in `target_duration`. The cost is that of all boards of the fleet, including those outside the round.

A board's reported idle power counts up to its reported power at work, and up to `MOST_TIMES_USUAL` times the
fleet's median. So a false report shortens rounds no more than as many honest devices would.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.proposals.candidate_plans import CandidatePlan, Plans
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.objective import ObjectiveSection

MOST_TIMES_USUAL = 10.0
MOST_DURATIONS = 64  # number of durations that are tried: neighbours differ by a few percent


@dataclass(frozen=True)
class IdleCost:
    """Power of idle boards in watts, that is joules for each second of idling.

    Attributes:
        of: idle power by device, for devices of the round that report it and the costs of their options.
        others: sum over all other boards of the fleet.
    """

    of: Mapping[DeviceId, float]
    others: float


def idle_cost(
    state: EngineState, plans: Mapping[DeviceId, Plans], objective: ObjectiveSection
) -> IdleCost | None:
    """Return the idle cost in a round with these options; None if idling is free or no device reports its
    power.
    """
    if objective.minimise != "energy":
        return None
    reports = {name: state.members[name].report for name in state.groups.eligible_ascending}
    reported_w = {
        name: report.idle_w
        for name, report in reports.items()
        if report and report.idle_w is not UNSET and report.idle_w
    }
    known = [
        name
        for name, some in plans.items()
        if name in reported_w and all(one.cost(objective) is not None for one in some)
    ]
    if not known:
        return None
    most_w = MOST_TIMES_USUAL * median(reported_w.values())
    own = {name: min(reported_w[name], most_w, _least_working_w(plans[name])) for name in known}
    return IdleCost(own, sum(min(idle_w, most_w) for name, idle_w in reported_w.items() if name not in own))


def within_cheapest_duration(
    plans: Mapping[DeviceId, Plans], objective: ObjectiveSection, idle: IdleCost, fixed_s: float = 0.0
) -> dict[DeviceId, Plans]:
    """Return each device's options within the cheapest duration that cost no more than its best one there.

    A device that does not report its costs keeps all options within the duration. `fixed_s`: lower bound of
    the round's duration.
    """
    least_s = max(fixed_s, *(min(one.seconds for one in some) for some in plans.values()))
    table = _Table.of({name: plans[name] for name in idle.of}, objective, idle)
    duration_s, extra = table.cheapest(_durations(plans, least_s), idle.others)
    allowed = dict(zip(idle.of, extra.tolist(), strict=True))

    def pays(name: DeviceId, one: CandidatePlan) -> bool:
        fits = one.seconds <= duration_s
        return fits and (name not in allowed or _extra(one, objective, idle.of[name]) <= allowed[name])

    return {name: [one for one in some if pays(name, one)] for name, some in plans.items()}


@dataclass(frozen=True)
class _Table:
    """Options of all devices as arrays of shape (devices, options); padding never fits a duration.

    Attributes:
        seconds, utility, extra: values of each option; `extra` is its cost beyond idling for the same time.
        idle: cost of a second of idling, shape (devices, 1).
    """

    seconds: NDArray[np.float64]
    utility: NDArray[np.float64]
    extra: NDArray[np.float64]
    idle: NDArray[np.float64]

    @classmethod
    def of(cls, plans: Mapping[DeviceId, Plans], objective: ObjectiveSection, idle: IdleCost) -> "_Table":
        """Return the table of these devices' options."""
        shape = len(plans), max((len(some) for some in plans.values()), default=0)
        seconds, utility, extra = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
        for row, (name, some) in enumerate(plans.items()):
            seconds[row, : len(some)] = [one.seconds for one in some]
            utility[row, : len(some)] = [one.utility for one in some]
            extra[row, : len(some)] = [_extra(one, objective, idle.of[name]) for one in some]
        return cls(seconds, utility, extra, np.array([[idle.of[name]] for name in plans]).reshape(-1, 1))

    def cheapest(self, durations_s: NDArray[np.float64], others: float) -> tuple[float, NDArray[np.float64]]:
        """Return the cheapest duration (the shortest of equals), and `extra` of each device's best option in
        it.
        """
        found = [self._at(float(duration_s), others) for duration_s in durations_s]
        best = int(np.argmax([efficiency for efficiency, _ in found]))
        return float(durations_s[best]), found[best][1]

    def _at(self, duration_s: float, others: float) -> tuple[float, NDArray[np.float64]]:
        """Return log(utility / cost) of a round of this duration, and `extra` of each best option."""
        cost = self.extra + self.idle * duration_s
        efficiency = np.divide(self.utility, cost, out=np.zeros_like(self.utility), where=cost > 0)
        chosen = np.argmax(np.where(self.seconds <= duration_s, efficiency, -1.0), axis=1, keepdims=True)
        utility, costs, extra = (
            np.take_along_axis(part, chosen, axis=1)[:, 0] for part in (self.utility, cost, self.extra)
        )
        total = costs.sum() + others * duration_s
        return float(np.log(utility).mean() - np.log(total)) if total else -np.inf, extra


def _durations(plans: Mapping[DeviceId, Plans], least_s: float) -> NDArray[np.float64]:
    """Return the durations to try, ascending; each leaves every device at least one option."""
    all_s: NDArray[np.float64] = np.unique(
        np.array([max(least_s, one.seconds) for some in plans.values() for one in some], np.float64)
    )
    if len(all_s) <= MOST_DURATIONS or all_s[0] <= 0:
        return all_s[-MOST_DURATIONS:]
    wanted_s = np.geomspace(all_s[0], all_s[-1], MOST_DURATIONS)
    picked = np.unique(np.minimum(np.searchsorted(all_s, wanted_s), len(all_s) - 1))
    return np.asarray(all_s[picked], np.float64)


def _extra(one: CandidatePlan, objective: ObjectiveSection, idle: float) -> float:
    """Return the cost of an option beyond idling for the same time."""
    return max(0.0, (one.cost(objective) or 0.0) - idle * one.seconds)


def _least_working_w(plans: Plans) -> float:
    """Return the least power that a device reports at work, in watts."""
    drawn = [one.joules / one.seconds for one in plans if one.joules is not None and one.seconds > 0]
    return min(drawn, default=0.0)
