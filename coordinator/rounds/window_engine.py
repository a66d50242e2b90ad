"""Semi-asynchronous rounds: an aggregation takes the updates that have arrived and waits for no straggler.

`round.participants` devices work at a time (None: all that are connected). A **window** is open until it is
aggregated, which counts as one round:

- `mode = "window"`: every `window_s`, and at once when no device is left to wait for. A window with fewer
  than `quorum` updates continues for another `window_s`.
- `mode = "buffer"`: as soon as `buffer` updates have arrived (never fewer than `quorum`). With `quorum`
  updates also after `deadline_s`, or when no device is left to wait for.

With fewer than `quorum` updates after `deadline_s` the window is abandoned and all devices start again, as
in a synchronous round.

A device whose update was accepted is done in this window. Its place goes at once to a device that has none.
It starts again itself on the next model (SRP-pFed, section III-D: "once a client receives the global model").
So an aggregation takes at most one update of a device. When a window closes, the other devices continue.
Their updates count in later windows, up to `max_staleness` aggregations later; devices that take longer start
again. Devices that disconnect keep their task but not their place.
"""

from typing import Any

from fleetune.coordinator.rounds.actions import Action
from fleetune.coordinator.rounds.engine import RoundEngine
from fleetune.coordinator.rounds.engine_state import EngineState
from fleetune.coordinator.rounds.policies.selection import choose, target
from fleetune.coordinator.rounds.policies.stragglers import Decision
from fleetune.coordinator.rounds.policies.unresponsive import miss
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.method import DeviceId, Method
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.coordinator import RoundSection
from fleetune.protocols.settings.run_settings import RunSettings


def check_method(settings: RunSettings, method: Method[Any, Any, Any, Any]) -> None:
    """Raise SettingError if the run's mode does not fit its method, schedule or objective."""
    mode, name = settings.round.mode, settings.method["name"]
    one_by_one = settings.schedule.every or settings.schedule.at or settings.schedule.asks_devices
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


def engine_type(settings: RoundSection) -> type[RoundEngine]:
    """The engine for [round] mode."""
    return RoundEngine if settings.mode == "synchronous" else WindowEngine


def idle(state: EngineState) -> tuple[DeviceId, ...]:
    """Connected devices without a part in the open window, ascending."""
    return tuple(sorted(state.groups.idle))


def draw_idle(state: EngineState, settings: RoundSection, seed: int) -> tuple[DeviceId, ...]:
    """Idle devices for the free places, ascending. The draw depends on the state and the seed only."""
    candidates, groups = idle(state), state.groups
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
    """Number of updates that a window needs. Devices that left lower it to what can still arrive."""
    groups = state.groups
    if not groups.left:
        return settings.quorum
    left = sum(not state.members[device].stays for device in groups.replied)
    return max(1, min(settings.quorum, len(groups.staying) + left))


def decide_window(state: EngineState, settings: RoundSection, seed: int, now: float) -> Decision | None:
    """Decide what happens to the open window at `now`. "deadline": it has too few updates. None: it stays
    open.
    """
    replies = len(state.groups.replied)
    due = state.timing.until is not None and now >= state.timing.until
    settled = not state.groups.awaited and not draw_idle(state, settings, seed)
    full = settings.mode == "buffer" and replies >= target(state, settings)
    if full or ((due or settled) and replies >= quorum(state, settings)):
        return "close"
    if settled:
        return "too-few"
    return "deadline" if due else None


class WindowEngine(RoundEngine):
    """A `RoundEngine` for `mode = "window"` and `mode = "buffer"`.

    Two differences for the driver: `StartRound` is repeated, marked `resumed`, when devices join an open
    window, perhaps after an `Admit`. A `SendTask` may name an earlier round; it then means the task that was
    sent before.
    """

    @property
    def _span_s(self) -> float:
        if self._round.mode == "window" and self.state.stage == "training":
            return self._round.window_s or self._round.deadline_s
        return self._round.deadline_s

    def _advance(self, now: float) -> list[Action]:
        actions = super()._advance(now)
        if self.state.stage == "training":
            actions += self._ask_idle()
        return actions

    def _ask_idle(self) -> list[Action]:
        devices = draw_idle(self.state, self._round, self._run.seed)
        if not devices:
            return []
        self.state.change(participants=tuple(sorted({*self.state.participants, *devices})))
        return self._ask(devices, resumed=True)

    def _decision(self, now: float) -> Decision | None:
        if self.state.stage == "evaluating":
            return super()._decision(now)
        decision = decide_window(self.state, self._round, self._run.seed, now)
        extended_s = (self.state.timing.extended + 2) * self._span_s
        if decision != "deadline" or extended_s > self._round.deadline_s:
            return decision
        self.state.change(until=now + self._span_s, extended=self.state.timing.extended + 1)
        return None

    def _closed(self, suspects: tuple[DeviceId, ...]) -> list[Action]:
        at_work = tuple(self.state.awaited)
        actions = super()._closed(suspects)
        carried = [device for device in at_work if not self._expire(device)]
        self.state.change(participants=tuple(carried))
        return actions

    def _expire(self, device: DeviceId) -> bool:
        """Give up a task whose update would be too stale in the coming window."""
        staleness = self.state.round_attempt.number - self.state.members[device].asked.number
        if staleness > self._round.max_staleness:
            self.state.put(device, answer="expired")
            miss(self.state, device)
            self.state.count("expired")
            return True
        return False

    def _start_if_possible(self, now: float) -> list[Action]:
        carried = self.state.participants
        if carried and (self.state.paused or (self._over is None and self._holds(now))):
            self.state.change(participants=())  # they are not awaited until the next window opens
            return []
        if not carried or self._over is not None:
            return super()._start_if_possible(now)
        self.state.move("round opens")
        devices = draw_idle(self.state, self._round, self._run.seed)
        self.state.change(participants=tuple(sorted({*carried, *devices})))
        return self._open(devices, now)
