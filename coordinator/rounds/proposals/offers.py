"""What a device may be proposed for a round, by what it says of itself, and how much that is worth and takes.

Before anything is known of the run: what rounds have shown stands in `objective.evidence`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import UNSET

from fleetune.coordinator.rounds.engine_state import Member
from fleetune.coordinator.rounds.objective.spending import MEGABYTE, Amounts
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.skeletons.choice import LOCAL_WORKS, Affordable, Budget

HALF = 0.25  # the ratio of half the work that could be; measured: rounds to 60 %, FedSPU (docs/ratios.md)
LEAST_WORK = 0.01  # that counts: a quarter of the training at p = 0.05; who claims to do less lies
BEYOND = 0.7  # more local training than once is worth as much, to this power; measured there, too
KILOWATT_HOUR = 3.6e6  # joules


@dataclass(frozen=True)
class Offer:
    """What a device may be proposed, and what that takes of it; None: not known.

    `fidelity`: of the encoding of its update.
    """

    budget: Budget
    round_s: float | None = None
    bytes_up: int | None = None
    joules: float | None = None
    fidelity: float = 1.0

    @property
    def seconds(self) -> float:
        """Of a round; one that is not known limits nothing."""
        return 0.0 if self.round_s is None else self.round_s

    @property
    def work(self) -> float:
        """See `work`; an encoding leaves as much of it as it has fidelity (`EncodingCost`).

        At least `LEAST_WORK`: one device of n that makes much of its least choice lengthens a round by no
        more than the n-th root of how many times as much its largest one is.
        """
        return max(LEAST_WORK, work(self.budget) * self.fidelity)


Choices = Sequence[Offer]
"""What a device may be proposed, the smallest ratio and least local training first, at least one."""


def choices_of(member: Member, objective: ObjectiveSection, fidelities: Sequence[float] = (1.0,)) -> Choices:
    """What a device could do of what may be proposed; (): it does not say.

    `fidelities`: of the run's encodings of updates; a device that does not know them is left at the first.
    """
    report = member.report
    if report is None or report.affords is UNSET:
        return ()
    allowed = [one for one in report.affords if one.ratio <= objective.at_most + 1e-9] or report.affords[:1]
    sizes = (1.0,) if report.values is UNSET else report.values
    ways = list(enumerate(zip(sizes, fidelities, strict=False)))
    return [offer for one in allowed for offer in _offers(one, objective, ways)]


def _offers(
    one: Affordable, objective: ObjectiveSection, ways: Sequence[tuple[int, tuple[float, float]]]
) -> list[Offer]:
    """At one ratio; with all of the local training alone where it does not say what that takes.

    `ways`: encodings of the update, by number the share of bytes and the fidelity.
    """
    most = min(one.local_work, objective.most_work)
    tells, least = one.local_s is not None, objective.least_work
    less = [local_work for local_work in LOCAL_WORKS if least <= local_work < most] if tells else []
    return [
        Offer(
            Budget(one.ratio, local_work, uplink),
            one.seconds(local_work, values),
            one.sent(values),
            one.energy(local_work, values),
            fidelity,
        )
        for local_work in (*less, most)
        for uplink, (values, fidelity) in ways[one.uplink :] or ways[:1]
    ]


def least_of_round(choices: Sequence[Choices], fixed_s: Sequence[float] = ()) -> Amounts:
    """That a round of these devices takes, each at the choice of least; (): it does not say.

    `fixed_s`: of devices that choose themselves, what they say of their rounds; it takes no less than the
    quickest of them, if there are no others.
    """
    said = [some for some in choices if some]
    return Amounts(
        max((min(one.seconds for one in some) for some in said), default=min(fixed_s, default=0.0)),
        sum(min(one.bytes_up or 0 for one in some) for some in said) / MEGABYTE,
        sum(min(one.joules or 0.0 for one in some) for some in said),
    )


def work(budget: Budget) -> float:
    """How much a round is worth, before anything is known: below 1 with the run's local training.

    Rounds that it took to an accuracy: 49, 38 and 25 at 0.2, 0.3 and 0.4, and more than 110 at 0.1. So a
    small ratio brings less than its share, and a large one little more than one half as large. Of the local
    training each step counts alike up to the run's epochs, and less beyond: with half, twice and four times
    as many it took 47, 15 and 10 rounds instead of 25 (p = 0.4, all devices alike, one seed).
    """
    trained = budget.local_work if budget.local_work <= 1 else budget.local_work**BEYOND
    return budget.ratio**2 / (budget.ratio**2 + HALF**2) * trained


def taken(one: Offer, objective: ObjectiveSection) -> float | None:
    """What a device takes in a round of bytes, joules or money."""
    match objective.minimise:
        case "bytes":
            return one.bytes_up
        case "energy":
            return one.joules
    price = objective.price
    sent, drawn = one.bytes_up if price.megabyte else 0, one.joules if price.kilowatt_hour else 0.0
    if sent is None or drawn is None:
        return None
    return price.megabyte * sent / MEGABYTE + price.kilowatt_hour * drawn / KILOWATT_HOUR
