"""Semi-asynchronous rounds: an aggregation uses the updates that have arrived and waits for no straggler.

At any time, `round.participants` devices work (None: all connected ones). A **window** is open until its
updates are aggregated, which counts as one round:

- `mode = "window"`: the window closes every `window_s`, and at once when no device is left to wait for. A
  window with fewer than `quorum` updates continues for another `window_s`.
- `mode = "buffer"`: the window closes once `buffer` updates have arrived (never fewer than `quorum`). With
  `quorum` updates it also closes after `deadline_s`, or when no device is left to wait for.

With fewer than `quorum` updates after `deadline_s` the window is abandoned and all devices start again, as
in a synchronous round.

A device whose update was accepted is done in this window. Its place goes at once to an idle device. The
device itself starts again from the next model (SRP-pFed, section III-D: "once a client receives the global
model"). So an aggregation uses at most one update of each device. When a window closes, the other devices
continue. Their updates count in later windows, up to `max_staleness` aggregations later; slower devices start
again. A device that disconnects keeps its task but not its place.

Two differences for the driver of the engine: `StartRound` is repeated, marked `resumed`, when devices join an
open window, perhaps after an `Admit`. A `SendTask` may name an earlier round; it then means the task that was
sent before.
"""

from typing import Any

from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.selection import choose, target
from fleetune.coordinator.rounds.policies.stragglers import Decision
from fleetune.coordinator.rounds.policies.unresponsive import miss
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.round import RoundSection
from fleetune.protocols.settings.run_settings import RunSettings


def check_method(settings: RunSettings, method: Method[Any, Any, Any, Any]) -> None:
    """Raise SettingError if the run's mode does not fit its method, schedule or objective."""
    mode, name = settings.round.mode, settings.method["name"]
    one_by_one = settings.schedule.every or settings.schedule.asks_devices
    if mode != "synchronous" and one_by_one:
        raise SettingError(
            f'round.mode = "{mode}": only [schedule] window can be set with it; rounds that open one by one'
            " would waste the work of stragglers"
        )
    if mode != "synchronous" and settings.objective.proposes:
        raise SettingError(
            f'objective.minimise = "{settings.objective.minimise}" needs rounds in which devices wait'
            f' for each other; remove it, or round.mode = "{mode}"'
        )
    if mode != "synchronous" and not method.semi_asynchronous:
        raise SettingError(
            f'round.mode = "{mode}": {name} needs all updates of a round; use round.mode = "synchronous"'
        )


def draw_idle(state: EngineState, settings: RoundSection, seed: int) -> tuple[DeviceId, ...]:
    """Draw idle devices for the free places, ascending. The draw depends on the state and the seed only."""
    candidates, groups = tuple(sorted(state.groups.idle)), state.groups
    if not candidates:
        return ()
    at_work = len(groups.at_work)
    key = Key.of("fleetune", seed).child("window", *state.round_attempt, len(state.participants))
    if settings.participants is None:
        enough = target(state, settings) if settings.mode == "buffer" else quorum(state, settings)
        count, least = len(candidates), enough - at_work - len(groups.replied)
    else:
        count = least = settings.participants - at_work
    return choose(candidates, state, settings, key, count=count, least=least)


def quorum(state: EngineState, settings: RoundSection) -> int:
    """Return the number of updates that a window needs, at most the number that can still arrive."""
    groups = state.groups
    if not groups.left:
        return settings.quorum
    left = sum(not state.members[device].stays for device in groups.replied)
    return max(1, min(settings.quorum, len(groups.staying) + left))


def decide_window(state: EngineState, settings: RoundSection, seed: int, now: float) -> Decision | None:
    """Decide what happens to the open window at `now`; None if the window stays open.

    A window that is over with too few updates is extended by its length, up to `deadline_s` in all.
    """
    replies, span_s = len(state.groups.replied), settings.window_s or settings.deadline_s
    overdue = state.timing.until is not None and now >= state.timing.until
    settled = not state.groups.awaited and not draw_idle(state, settings, seed)
    full = settings.mode == "buffer" and replies >= target(state, settings)
    if full or ((overdue or settled) and replies >= quorum(state, settings)):
        return "close"
    if settled:
        return "too-few"
    if not overdue or (state.timing.extended + 2) * span_s > settings.deadline_s:
        return "deadline" if overdue else None
    state.change(until=now + span_s, extended=state.timing.extended + 1)
    return None


def expire(state: EngineState, device: DeviceId, settings: RoundSection) -> bool:
    """Withdraw a device's task if its update would be too stale in the next window; True if withdrawn."""
    staleness = state.round_attempt.number - state.members[device].asked.number
    if staleness <= settings.max_staleness:
        return False
    state.put(device, answer="expired")
    miss(state, device)
    state.count("expired")
    return True
