"""How long a round may take: what its devices expect of it, and what became of such expectations before."""

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.policies.selection import target
from fleetune.protocols.settings.coordinator import RoundSection
from fleetune.protocols.settings.objective import ObjectiveSection

SHORTEST_S = 1.0  # below it the network and this process itself decide, not the devices


def keeps_pace(settings: RoundSection, objective: ObjectiveSection) -> bool:
    """Whether rounds are as short as it pays."""
    return settings.mode == "synchronous" and objective.minimise == "time"


def proposed_s(state: EngineState, settings: RoundSection, objective: ObjectiveSection) -> float:
    """Seconds that the turn which opens is given.

    With `deadline = "predicted"`: when enough of those asked should have replied, by their own words as far
    as these are trusted (see `learn`), times the slack. A second attempt gets the whole `deadline_s`: the
    first one's expectations were not worth much. So does the final evaluation, which is to hear everybody.

    So it is where a round keeps a pace, and there by their own words alone: who is held up, by a link that
    is gone for a while, holds up nobody else. A device that takes longer than it thinks learns that from its
    late rounds by itself; one that lies is late.
    """
    paced = keeps_pace(settings, objective)
    if (settings.deadline == "fixed" and not paced) or state.stage != "training" or state.attempt > 1:
        return settings.deadline_s
    members = [state.members[device] for device in state.participants]
    expected_s = sorted(_expected_s(one, settings, 1.0 if paced else one.observed.stretch) for one in members)
    enough_s = expected_s[target(state, settings) - 1]
    return min(settings.deadline_s, max(SHORTEST_S, settings.deadline_slack * enough_s))


def learn(state: EngineState, settings: RoundSection) -> None:
    """Let the state know its devices better now that its turn, whose deadline was proposed, is over.

    Whoever was there and still at work when time was up counts as twice as slow from now on; with each update
    that was in time that eases by a tenth. So devices that keep underestimating a round miss one at times
    instead of all.
    """
    if settings.deadline == "fixed" or state.attempt > 1:
        return
    replied = state.replied
    for device in tuple(state.groups.at_work) if len(replied) < target(state, settings) else ():
        member = state.members[device]
        if _expected_s(member, settings, member.observed.stretch) < settings.deadline_s:
            state.put(device, stretch=2 * member.observed.stretch)
    for device in replied:
        if state.members[device].observed.stretch > 1.0:
            state.put(device, stretch=max(1.0, 0.9 * state.members[device].observed.stretch))


def _expected_s(member: Member, settings: RoundSection, stretch: float) -> float:
    """Of one device; what it does not know, or cannot be, counts as the whole deadline."""
    said_s = member.at_work.round_s if member.at_work else None
    if said_s is None or not 0 < said_s * stretch <= settings.deadline_s:
        return settings.deadline_s
    return said_s * stretch
