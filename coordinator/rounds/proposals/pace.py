"""How much each participant does, where a run has an objective (`[objective] minimise`).

A device says what it could do and what that takes (`DeviceReport.affords`); what its limits or its owner do
not allow is not among that. Of that the coordinator proposes, for each task, a ratio, a share of the local
training (or more of it than once) and an encoding of the update, as much of this as pays:

    time    what keeps the pace. A round is as long as its slowest participant; the pace, a time that nobody
            should exceed and everybody can keep, is the one of most work a second (`Offer.work`), where the
            work of a fleet is the geometric mean of its devices': twice the work of one that does little is
            worth as much as twice that of one that does much (proportional fairness; Kelly 1997)
    bytes   what sends no more than that of most work a byte; `energy` and `money` likewise, and where devices
            say what their boards draw doing nothing, at the pace that takes least of it (`proposals.idling`).
            Where most run on batteries, what waiting draws ends their part in the run: of what sends so
            little they do what keeps the pace

and of these the choice of most work (`Offer.work`).

What a device says of its seconds moves the pace, but to no longer one than what fits the run's deadline, by
which devices choose without an objective. Who says too little is waited for as ever.
"""

from collections.abc import Collection, Mapping, Sequence
from math import log

import numpy as np

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.proposals.idling import idling_of, waiting_no_longer_than_pays
from fleetune.coordinator.rounds.proposals.offers import Choices, Offer, Ways, choices_of, taken
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.update.encodings.encoding import EncodingCost


def deal(
    state: EngineState,
    participants: Sequence[DeviceId],
    objective: ObjectiveSection,
    ways: Ways,
) -> None:
    """Propose to each participant that says what it affords how much it does."""
    known = ways.known(state.left_out)
    asked = {device: choices_of(state.members[device], objective, known) for device in participants}
    choices = {device: some for device, some in asked.items() if some}
    paying = what_pays(state, choices, objective, _longest_fixed_s(state, asked))
    for device, some in sorted(paying.items()):
        _propose(state, device, most_work(some).budget)


def note_shown(state: EngineState, uplinks: Sequence[EncodingCost] = ()) -> None:
    """Learn from the round that closes; `uplinks`: what the run's encodings of updates take and give."""
    told: dict[int, list[float]] = {}
    for device in state.replied:
        member = state.members[device]
        if member.dealt is not None and member.left_out is not None and member.dealt.uplink < len(uplinks):
            told.setdefault(member.dealt.uplink, []).append(member.left_out)
    if told or state.left_out.shares:
        state.change(left_out=state.left_out.after(told, uplinks))


def what_pays(
    state: EngineState,
    choices: Mapping[DeviceId, Choices],
    objective: ObjectiveSection,
    fixed_s: float = 0.0,
) -> dict[DeviceId, Choices]:
    """Of each device's choices those that are worth what they take; at least one.

    `fixed_s`: a round takes so long anyhow.
    """
    if objective.minimise == "time":
        return keeping_pace(choices, fixed_s)
    idling = idling_of(state, choices, objective)
    if idling is not None:
        return waiting_no_longer_than_pays(choices, objective, idling, fixed_s)
    little = {device: frugal(some, objective) for device, some in choices.items()}
    return keeping_pace(little, fixed_s) if _on_batteries(state, choices) else little


def _on_batteries(state: EngineState, devices: Collection[DeviceId]) -> bool:
    """Whether more than half of these devices say so."""
    reports = [state.members[device].report for device in devices]
    drained = sum(report is not None and report.conditions.power == "battery" for report in reports)
    return 2 * drained > len(devices)


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
    if paces_s[0] <= 0:  # nobody knows what anything takes
        return float(paces_s[-1])
    return float(paces_s[np.argmax(done / len(choices) - np.log(paces_s))])


def _steps(choices: Choices) -> list[tuple[float, float]]:
    """How much more work a device can do from a pace on: seconds, the logarithm of how many times as much; of
    the first one, of the work itself.
    """
    steps: list[tuple[float, float]] = []
    most = 1.0
    for one in sorted(choices, key=lambda one: (one.seconds, -one.work)):
        if not steps or one.work > most:
            steps.append((one.seconds, log(one.work / most)))
            most = one.work
    return steps


def frugal(choices: Choices, objective: ObjectiveSection) -> Choices:
    """Those that take no more of what is to be minimised than that of most work for it; all, where that is
    not known.
    """
    amounts = [taken(one, objective) for one in choices]
    known = [one for one in amounts if one is not None]
    if len(known) < len(choices):
        return choices
    _, most = max(
        (one.work / amount if amount else 0.0, amount) for one, amount in zip(choices, known, strict=True)
    )
    return [one for one, amount in zip(choices, known, strict=True) if amount <= most]


def _longest_fixed_s(state: EngineState, asked: Mapping[DeviceId, Choices]) -> float:
    """Of those that say nothing of what they could do, agents of older releases."""
    reports = [state.members[device].report for device, some in asked.items() if not some]
    return max((report.round_s or 0.0 for report in reports if report), default=0.0)


def most_work(choices: Choices) -> Offer:
    """The choice of most work; of equals the one of the largest ratio, then of the fewest bytes."""
    return max(reversed(choices), key=lambda one: (one.work, one.budget.ratio, -(one.bytes_up or 0)))


def _propose(state: EngineState, device: DeviceId, budget: Budget) -> None:
    member = state.members[device]
    same = member.at_work is not None and member.at_work.ratio == budget.ratio
    state.put(device, dealt=budget, admitted=member.admitted and same)
