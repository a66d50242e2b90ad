"""The options that a device has for a round, with the predicted cost and utility of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from fleetune.coordinator.rounds.engine_state import Member
from fleetune.coordinator.rounds.objective.left_out import LeftOut
from fleetune.coordinator.rounds.objective.spending import MEGABYTE, Amounts
from fleetune.protocols.method.choice import LOCAL_WORKS, Affordable, Budget
from fleetune.protocols.method.worth import usual_worth
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.update.encodings.encoding import EncodingCost

LEAST_WORK = 0.01  # that counts: a quarter of the training at p = 0.05; who claims to do less lies
KILOWATT_HOUR = 3.6e6  # joules

Worth = Callable[[Budget], float]


@dataclass(frozen=True)
class Offer:
    """What a device may be proposed, and what that takes of it; None: not known.

    `fidelity`: of the encoding of its update; `worth`: see `Method.worth`.
    """

    budget: Budget
    round_s: float | None = None
    bytes_up: int | None = None
    joules: float | None = None
    fidelity: float = 1.0
    worth: Worth = usual_worth

    @property
    def seconds(self) -> float:
        """Of a round; one that is not known limits nothing."""
        return 0.0 if self.round_s is None else self.round_s

    @property
    def work(self) -> float:
        """What it is worth; an encoding leaves as much of that as it has fidelity (`EncodingCost`).

        At least `LEAST_WORK`: one device of n that makes much of its least choice lengthens a round by no
        more than the n-th root of how many times as much its largest one is.
        """
        return max(LEAST_WORK, self.worth(self.budget) * self.fidelity)


Choices = Sequence[Offer]
"""What a device may be proposed, the smallest ratio and least local training first, at least one."""


@dataclass(frozen=True)
class Ways:
    """What a run has beside ratios and local training, and what all of it is worth.

    Attributes:
        uplinks: what its encodings of updates take and give (`Enrolment.uplinks`); (): it has but one.
        worth: of a round, see `Method.worth`.
    """

    uplinks: tuple[EncodingCost, ...] = ()
    worth: Worth = usual_worth

    def known(self, left_out: LeftOut) -> "KnownWays":
        """With what rounds have shown of encodings."""
        return KnownWays(left_out.fidelities(self.uplinks), self.worth)


@dataclass(frozen=True)
class KnownWays:
    """See `Ways`; `fidelities`: of the run's encodings of updates."""

    fidelities: tuple[float, ...] = (1.0,)
    worth: Worth = usual_worth


def choices_of(member: Member, objective: ObjectiveSection, ways: KnownWays = KnownWays()) -> Choices:
    """What a device could do of what may be proposed; (): it does not say. One that does not know the run's
    encodings is left at the first.
    """
    report = member.report
    if report is None or report.affords is UNSET:
        return ()
    allowed = [one for one in report.affords if one.ratio <= objective.at_most + 1e-9] or report.affords[:1]
    sizes = (1.0,) if report.values is UNSET else report.values
    encodings = list(enumerate(zip(sizes, ways.fidelities, strict=False)))
    return [offer for one in allowed for offer in _offers(one, objective, encodings, ways.worth)]


def _offers(
    one: Affordable,
    objective: ObjectiveSection,
    encodings: Sequence[tuple[int, tuple[float, float]]],
    worth: Worth,
) -> list[Offer]:
    """At one ratio; with all of the local training alone where it does not say what that takes.

    `encodings`: of the update, by number the share of bytes and the fidelity.
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
            worth,
        )
        for local_work in (*less, most)
        for uplink, (values, fidelity) in encodings[one.uplink :] or encodings[:1]
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
