"""Decides when a round closes without its stragglers: the devices that have not replied.

A round waits for `round.participants` updates. Three rules let it close without its stragglers:

- **over-selection** (`round.over_selection`, see `policies.selection`): more devices are selected than are
  needed, and the round closes with the first updates;
- **the deadline** (`round.deadline_s`, see `policies.deadline`): after it, `round.quorum` updates suffice;
- **no device left to wait for**: every participant has replied, declined or left.

A straggler's reply to a closed round is dropped (`rounds.rejections`: "late"). A device that misses several
deadlines in a row is selected less often (`policies.unresponsive`). Semi-asynchronous rounds keep a
straggler's update for a later window (`rounds.policies.semi_asynchronous`).
"""

from typing import Literal

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.selection import target
from fleetune.protocols.settings.round import RoundSection

Decision = Literal["close", "deadline", "too-few"]
"""close: aggregate the updates that have arrived. deadline, too-few: abandon the attempt with fewer than
`round.quorum` updates, because the deadline has passed or no device is left to wait for.
"""


def decide(state: EngineState, settings: RoundSection, now: float) -> Decision | None:
    """Decide what happens to the open round, or the final evaluation, at `now`; None if it stays open."""
    overdue = state.timing.until is not None and now >= state.timing.until
    settled = not state.groups.awaited
    if state.stage == "evaluating":
        return "close" if overdue or settled else None
    replies = len(state.groups.replied)
    if replies >= target(state, settings) or ((overdue or settled) and replies >= settings.quorum):
        return "close"
    if overdue:
        return "deadline"
    return "too-few" if settled else None
