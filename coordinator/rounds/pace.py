"""How much each participant does, where a run has an objective (`[objective] minimise`).

A device says what it could do and what that takes (`DeviceReport.affords`); what its limits or its owner do
not allow is not among that. Of that the coordinator proposes, for each task, a ratio, a share of the local
training (or more of it than once) and an encoding of the update, as much of this as pays:

    time    what keeps the pace. A round is as long as its slowest participant; the pace, a time that nobody
            should exceed and everybody can keep, is the one of most work a second (`work`)
    bytes   what sends no more than that of most work a byte; `energy` and `money` likewise

and there what is worth most, by what rounds have shown (`objective.evidence`) and by its work for the others,
drawn anew every `BLOCK` of a device's rounds.

What a device says of its seconds moves the pace, but to no longer one than what fits the run's deadline, by
which devices choose without an objective. Who says too little is waited for as ever.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import UNSET

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.objective.evidence import Shown
from fleetune.coordinator.rounds.objective.spending import MEGABYTE, Amounts
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.skeletons.choice import LOCAL_WORKS, Affordable, Budget
from fleetune.protocols.skeletons.method import DeviceId

HALF = 0.25  # the ratio of half the work that could be; measured: rounds to 60 %, FedSPU (docs/ratios.md)
BEYOND = 0.7  # more local training than once is worth as much, to this power; measured there, too
BLOCK = 4
KILOWATT_HOUR = 3.6e6  # joules
FOR_OTHERS = (
    1.0  # what a whole model's work is worth to the others, in units of the noise; measured there, too
)


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
        """See `work`; an encoding leaves as much of it as it has fidelity (`EncodingCost`)."""
        return work(self.budget) * self.fidelity


Choices = Sequence[Offer]
"""What a device may be proposed, the smallest ratio and least local training first, at least one."""


def deal(
    state: EngineState,
    participants: Sequence[DeviceId],
    objective: ObjectiveSection,
    seed: int,
    fidelities: Sequence[float] = (1.0,),
) -> None:
    """Propose to each participant that says what it affords how much it does."""
    asked = {device: choices_of(state.members[device], objective, fidelities) for device in participants}
    choices = {device: some for device, some in asked.items() if some}
    if objective.minimise == "time":
        paying = keeping_pace(choices, _longest_fixed_s(state, asked))
    else:
        paying = {device: frugal(some, objective) for device, some in choices.items()}
    for index, (device, some) in enumerate(sorted(paying.items())):
        block = (state.turn.number + index) // BLOCK  # not all in the same round: each compares with others
        key = Key.of("fleetune", seed).child("pace", block, device)
        _propose(state, device, _worth_most(state, some, key))


def note_scores(state: EngineState) -> None:
    """Learn from the round that closes."""
    now = {device: shown for device in state.replied if (shown := _shows(state.members[device]))}
    then = {device: shown for device in now if (shown := state.members[device].shown)}
    if then:
        state.change(evidence=state.evidence.after({device: (then[device], now[device]) for device in then}))
    for device, shown in now.items():
        state.put(device, shown=shown)


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


def least_of_round(choices: Sequence[Choices]) -> Amounts:
    """That a round of these devices takes, each at the choice of least; (): it does not say."""
    said = [some for some in choices if some]
    return Amounts(
        max((min(one.seconds for one in some) for some in said), default=0.0),
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


def keeping_pace(choices: Mapping[DeviceId, Choices], fixed_s: float = 0.0) -> dict[DeviceId, Choices]:
    """Of each device's choices those that keep the pace that pays best, the shortest of equals; at least one.

    `fixed_s`: a round takes so long anyhow.
    """
    pace_s = _pace_s(list(choices.values()), fixed_s)
    return {device: [one for one in some if one.seconds <= pace_s] for device, some in choices.items()}


def _pace_s(choices: Sequence[Choices], fixed_s: float) -> float:
    """The pace of most work a second, the shortest of equals, that everybody can keep."""
    if not choices:
        return 0.0
    least_s = max(fixed_s, *(min(one.seconds for one in some) for some in choices))
    steps = np.array([step for some in choices for step in _steps(some)])
    steps = steps[np.argsort(steps[:, 0], kind="stable")]
    paces_s, done = np.maximum(steps[:, 0], least_s), np.cumsum(steps[:, 1])
    last = np.append(paces_s[1:] > paces_s[:-1], True)  # of those at the same pace: all is done by then
    paces_s, done = paces_s[last], done[last]
    pays = np.divide(done, paces_s, out=np.zeros_like(done), where=paces_s > 0)
    return float(paces_s[np.argmax(pays)])


def _steps(choices: Choices) -> list[tuple[float, float]]:
    """How much more work a device can do from a pace on: seconds, work."""
    steps, most = [], 0.0
    for one in sorted(choices, key=lambda one: one.seconds):
        if one.work > most:
            steps.append((one.seconds, one.work - most))
            most = one.work
    return steps


def frugal(choices: Choices, objective: ObjectiveSection) -> Choices:
    """Those that take no more of what is to be minimised than that of most work for it; all, where that is
    not known.
    """
    taken = [_taken(one, objective) for one in choices]
    known = [one for one in taken if one is not None]
    if len(known) < len(choices):
        return choices
    _, most = max(
        (one.work / amount if amount else 0.0, amount) for one, amount in zip(choices, known, strict=True)
    )
    return [one for one, amount in zip(choices, known, strict=True) if amount <= most]


def _taken(one: Offer, objective: ObjectiveSection) -> float | None:
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


def _longest_fixed_s(state: EngineState, asked: Mapping[DeviceId, Choices]) -> float:
    """Of those that say nothing of what they could do, agents of older releases."""
    reports = [state.members[device].report for device, some in asked.items() if not some]
    return max((report.round_s or 0.0 for report in reports if report), default=0.0)


def _worth_most(state: EngineState, choices: Choices, key: Key) -> Budget:
    """What is worth most to its device and to the others, as far as is known; of equals the largest."""
    by_work = sorted(choices, key=lambda one: (one.work, -(one.bytes_up or 0)))
    whole = {one.budget.ratio: one for one in by_work}  # the most work that pays at each ratio
    drawn = state.evidence.drawn([one.budget for one in whole.values()], key)
    worths = zip(drawn, whole.values(), strict=True)
    return max(worths, key=lambda pair: (pair[0] + FOR_OTHERS * pair[1].work, pair[1].budget.ratio))[1].budget


def _propose(state: EngineState, device: DeviceId, budget: Budget) -> None:
    member = state.members[device]
    same = member.at_work is not None and member.at_work.ratio == budget.ratio
    state.put(device, dealt=budget, admitted=member.admitted and same)


def _shows(member: Member) -> Shown | None:
    return None if member.dealt is None or member.score is None else Shown(member.dealt, member.score)
