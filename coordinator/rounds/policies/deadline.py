"""How long a round may take: from its devices' predictions, corrected by how earlier predictions turned
out.
"""

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.policies.selection import target
from fleetune.protocols.settings.coordinator import RoundSection
from fleetune.protocols.settings.objective import ObjectiveSection

SHORTEST_S = 1.0  # in seconds; below it network and coordinator set the duration, not the devices


def keeps_pace(settings: RoundSection, objective: ObjectiveSection) -> bool:
    """True if the deadline follows the target round duration."""
    return settings.mode == "synchronous" and objective.minimise == "time"


def proposed_s(state: EngineState, settings: RoundSection, objective: ObjectiveSection) -> float:
    """Seconds given to the attempt that opens.

    With `deadline = "predicted"`: the time by which enough participants should have replied, times the slack.
    It uses their predictions, each stretched by the device's record (see `learn`). A second attempt gets the
    whole `deadline_s`, because the first one's predictions were wrong. So does the final evaluation, which
    should hear from every device.

    Rounds that follow the target duration use the devices' predictions without stretch, so a device that is
    delayed by a broken link delays no other. A device that underestimates corrects itself after late rounds;
    a device that reports false times is late.
    """
    paced = keeps_pace(settings, objective)
    if (settings.deadline == "fixed" and not paced) or state.stage != "training" or state.attempt > 1:
        return settings.deadline_s
    members = [state.members[device] for device in state.participants]
    expected_s = sorted(_expected_s(one, settings, 1.0 if paced else one.observed.stretch) for one in members)
    enough_s = expected_s[target(state, settings) - 1]
    return min(settings.deadline_s, max(SHORTEST_S, settings.deadline_slack * enough_s))


def learn(state: EngineState, settings: RoundSection) -> None:
    """Update each device's stretch now that an attempt with a predicted deadline is over.

    A device that was connected and still at work at the deadline counts as twice as slow from now on. Each
    update in time reduces that by a tenth. So devices that keep underestimating a round miss some rounds, not
    all.
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
    """Predicted seconds of one device; the whole deadline if the prediction is missing or impossible."""
    said_s = member.at_work.round_s if member.at_work else None
    if said_s is None or not 0 < said_s * stretch <= settings.deadline_s:
        return settings.deadline_s
    return said_s * stretch
