"""Sets the time limit of a round: the deadline, a window, or the target round duration."""

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.policies.selection import target
from fleetune.protocols.settings.objective import ObjectiveSection
from fleetune.protocols.settings.round import RoundSection

SHORTEST_S = 1.0  # in seconds; below it network and coordinator set the duration, not the devices


def keeps_pace(settings: RoundSection, objective: ObjectiveSection) -> bool:
    """True if deadlines follow the target round duration, because the run minimises time."""
    return settings.mode == "synchronous" and objective.minimise == "time"


def proposed_s(state: EngineState, settings: RoundSection, objective: ObjectiveSection) -> float:
    """Return the time limit of the attempt that opens, in seconds: `deadline_s`, or `window_s` in `mode =
    "window"`.

    With `objective.minimise = "time"`, the limit is the time by which enough participants predict to have
    replied, times `deadline_slack`. A device that underestimates its time corrects the estimate after late
    rounds. A second attempt gets the whole `deadline_s`, because the predictions for the first were wrong. So
    does the final evaluation, because every device should reply to it.
    """
    if settings.window_s is not None and state.stage == "training":
        return settings.window_s
    if not keeps_pace(settings, objective) or state.stage != "training" or state.attempt > 1:
        return settings.deadline_s
    expected_s = sorted(_expected_s(state.members[device], settings) for device in state.participants)
    enough_s = expected_s[target(state, settings) - 1]
    return min(settings.deadline_s, max(SHORTEST_S, settings.deadline_slack * enough_s))


def _expected_s(member: Member, settings: RoundSection) -> float:
    """Return a device's predicted seconds; the whole deadline if the prediction is missing or impossible."""
    said_s = member.at_work.round_s if member.at_work else None
    return settings.deadline_s if said_s is None or not 0 < said_s <= settings.deadline_s else said_s
