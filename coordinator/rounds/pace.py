"""At which ratio each participant works, where a run has an objective (`[objective] minimise`).

A device says what it could do and what that takes (`DeviceReport.affords`); what its limits or its owner do
not allow is not among that. Of that the coordinator proposes, for each task

    time    what keeps the pace. A round is as long as its slowest participant; the pace, a time that nobody
            should exceed, is the one of most work a second (`work`). Who cannot keep it works at its
            smallest ratio
    energy  what takes no more joules than the ratio of most work a joule

and there the ratio that is worth most, by what rounds have shown (`objective.evidence`) and by its work for
the others, drawn anew every `BLOCK` of a device's rounds.

What a device says of its seconds moves the pace, but to no longer one than what fits the run's deadline, by
which devices choose without an objective. Who says too little is waited for as ever.
"""

from collections.abc import Mapping, Sequence

from msgspec import UNSET

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.objective.evidence import Shown
from fleetune.coordinator.rounds.objective.spending import MEGABYTE, Amounts
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.skeletons.choice import Affordable
from fleetune.protocols.skeletons.method import DeviceId

HALF = 0.25  # the ratio of half the work that could be; measured: rounds to 60 %, FedSPU (docs/ratios.md)
BLOCK = 4
FOR_OTHERS = (
    1.0  # what a whole model's work is worth to the others, in units of the noise; measured there, too
)

Choices = Sequence[Affordable]
"""What a device may be proposed, ascending by ratio, at least one."""


def deal(
    state: EngineState, participants: Sequence[DeviceId], objective: ObjectiveSection, seed: int
) -> None:
    """Propose a ratio to each participant that says what it affords."""
    asked = {device: choices_of(state.members[device], objective) for device in participants}
    choices = {device: some for device, some in asked.items() if some}
    if objective.minimise == "time":
        paying = keeping_pace(choices, _longest_fixed_s(state, asked))
    else:
        paying = {device: frugal(some) for device, some in choices.items()}
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


def choices_of(member: Member, objective: ObjectiveSection) -> Choices:
    """What a device could do of what may be proposed; (): it does not say."""
    report = member.report
    if report is None or report.affords is UNSET:
        return ()
    return [one for one in report.affords if one.ratio <= objective.at_most + 1e-9] or report.affords[:1]


def least_of_round(choices: Sequence[Choices]) -> Amounts:
    """That a round of these devices takes, each at the choice of least; (): it does not say."""
    said = [some for some in choices if some]
    return Amounts(
        max((min(one.round_s or 0.0 for one in some) for some in said), default=0.0),
        sum(min(one.bytes_up or 0 for one in some) for some in said) / MEGABYTE,
        sum(min(one.joules or 0.0 for one in some) for some in said),
    )


def work(ratio: float) -> float:
    """How much a round at this ratio is worth, before anything is known: 0 to 1.

    Rounds that it took to an accuracy: 49, 38 and 25 at 0.2, 0.3 and 0.4, and more than 110 at 0.1. So a
    small ratio brings less than its share, and a large one little more than one half as large.
    """
    return ratio**2 / (ratio**2 + HALF**2)


def keeping_pace(choices: Mapping[DeviceId, Choices], fixed_s: float = 0.0) -> dict[DeviceId, Choices]:
    """Of each device's choices those that keep the pace that pays best, the shortest of equals; at least one.

    `fixed_s`: a round takes so long anyhow.
    """
    least_s = max((min(map(_seconds, some)) for some in choices.values()), default=0.0)
    told_s = {_seconds(one) for some in choices.values() for one in some}
    paces_s = sorted(max(fixed_s, one) for one in told_s if one >= least_s)

    def pays(pace_s: float) -> float:
        done = sum(max(work(one.ratio) for one in _within(pace_s, some)) for some in choices.values())
        return done / pace_s if pace_s > 0 else 0.0

    pace_s = max(paces_s, key=pays, default=0.0)
    return {device: _within(pace_s, some) for device, some in choices.items()}


def frugal(choices: Choices) -> Choices:
    """Those up to the ratio of most work a joule; all, where joules are not known."""

    def pays(one: Affordable) -> float:
        return work(one.ratio) / one.joules if one.joules else 0.0

    if any(one.joules is None for one in choices):
        return choices
    most = max(choices, key=pays)
    return [one for one in choices if one.ratio <= most.ratio]


def _longest_fixed_s(state: EngineState, asked: Mapping[DeviceId, Choices]) -> float:
    """Of those that say nothing of what they could do, agents of older releases."""
    reports = [state.members[device].report for device, some in asked.items() if not some]
    return max((report.round_s or 0.0 for report in reports if report), default=0.0)


def _within(pace_s: float, choices: Choices) -> Choices:
    return [one for one in choices if _seconds(one) <= pace_s] or choices[:1]


def _worth_most(state: EngineState, choices: Choices, key: Key) -> float:
    """The ratio that is worth most to its device and to the others, as far as is known."""
    ratios = [one.ratio for one in choices]
    worths = zip(state.evidence.drawn(ratios, key), ratios, strict=True)
    return max((worth + FOR_OTHERS * work(ratio), ratio) for worth, ratio in worths)[1]


def _propose(state: EngineState, device: DeviceId, ratio: float) -> None:
    member = state.members[device]
    same = member.at_work is not None and member.at_work.ratio == ratio
    state.put(device, dealt=ratio, admitted=member.admitted and same)


def _shows(member: Member) -> Shown | None:
    return None if member.dealt is None or member.score is None else (member.dealt, member.score)


def _seconds(one: Affordable) -> float:
    return 0.0 if one.round_s is None else one.round_s
