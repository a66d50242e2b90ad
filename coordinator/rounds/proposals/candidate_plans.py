"""Lists the options (candidate plans) of a device for a round, with predicted cost and utility."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from fleetune.coordinator.rounds.engine_state import Member
from fleetune.protocols.method.choice import LOCAL_WORKS, Budget, RatioCandidate
from fleetune.protocols.settings.objective import ObjectiveSection

LEAST_UTILITY = 0.01  # a quarter of the training at p = 0.05; a device that reports less gains nothing by it

Utility = Callable[[Budget], float]


@dataclass(frozen=True)
class CandidatePlan:
    """One option of a device for a round. A cost that the device does not report is None.

    Attributes:
        budget: ratio, share of local training and encoding.
        round_s: predicted seconds of the device's round.
        bytes_up: predicted bytes of its update.
        joules: predicted energy of its board.
        utility: `Method.utility` of the budget times the encoding's `utility_factor`, at least
            `LEAST_UTILITY`. The bound limits what a false report can do: one device of n that overstates its
            largest option lengthens a round by at most the n-th root of largest over least utility.
    """

    budget: Budget
    round_s: float | None = None
    bytes_up: int | None = None
    joules: float | None = None
    utility: float = LEAST_UTILITY

    @property
    def seconds(self) -> float:
        """Predicted seconds; 0 if unknown, so that an unknown duration excludes nothing."""
        return 0.0 if self.round_s is None else self.round_s

    def cost(self, objective: ObjectiveSection) -> float | None:
        """Return bytes or joules, whichever the objective minimises; None if unknown."""
        return self.bytes_up if objective.minimise == "bytes" else self.joules


Plans = Sequence[CandidatePlan]
"""The options of one device, ascending by ratio and local training; at least one."""


def candidate_plans(
    member: Member, objective: ObjectiveSection, factors: Sequence[float], utility: Utility
) -> Plans:
    """Return the options of a device within the run's limits; () if it reports none.

    Args:
        member: the device's state, with a report.
        objective: the run's section [objective].
        factors: utility factor of each of the run's encodings of updates. A device that does not know the
            encodings uses the first.
        utility: `Method.utility`.
    """
    report = member.report
    if report is None or report.affords is UNSET:
        return ()
    allowed = [one for one in report.affords if one.ratio <= objective.at_most + 1e-9] or report.affords[:1]
    sizes = (1.0,) if report.values is UNSET else report.values
    encodings = list(enumerate(zip(sizes, factors, strict=False)))
    return [
        CandidatePlan(
            budget := Budget(one.ratio, local_work, uplink),
            one.seconds(local_work, values),
            one.sent(values),
            one.energy(local_work, values),
            max(LEAST_UTILITY, utility(budget) * factor),
        )
        for one in allowed
        for local_work in _local_works(one, objective)
        for uplink, (values, factor) in encodings[one.uplink :] or encodings[:1]
    ]


def _local_works(candidate: RatioCandidate, objective: ObjectiveSection) -> list[float]:
    """Return the shares of local training to choose from; only the largest share if its cost is unknown."""
    most = min(candidate.local_work, objective.most_work)
    if candidate.local_s is None:
        return [most]
    return [*(share for share in LOCAL_WORKS if objective.least_work <= share < most), most]
