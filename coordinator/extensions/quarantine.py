"""Quarantine: updates of a device that was outlying in several rounds in a row do not count for a while.

The device still trains, so that its next updates can show that it is like the others again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Self

from msgspec import Struct, field

from fleetune.coordinator.extensions.extension import (
    ClosedRound,
    Extension,
    RoundUpdates,
    RunContext,
    StateSlot,
)
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.wire.payloads import Reply

_QUARANTINE = "quarantine"  # its name in the store


class Standing(Struct, frozen=True, omit_defaults=True):
    """How one device stands.

    Attributes:
        streak: number of rounds in a row that speak for a change: outlying ones, or in quarantine others.
        held: True in quarantine.
    """

    streak: int = 0
    held: bool = False

    def after(self, *, outlying: bool, enough: int) -> "Standing":
        """Return the standing after one more round."""
        if outlying == self.held:
            return Standing(held=self.held)
        streak = self.streak + 1
        return Standing(held=not self.held) if streak >= enough else Standing(streak, self.held)


class Standings(Struct, frozen=True):
    """Standings after the last closed round, and after the one before it; other devices have a new one."""

    last: dict[DeviceId, Standing] = field(default_factory=dict)
    before: dict[DeviceId, Standing] = field(default_factory=dict)


class Quarantine(Extension):
    """Gives the updates of devices in quarantine no weight.

    Args:
        store: of the run.
        rounds: `round.quarantine`.
    """

    slots = (_QUARANTINE,)

    def __init__(self, store: RunStore, rounds: int) -> None:
        self._slot = StateSlot(store, _QUARANTINE, Standings, Standings())
        self._rounds, self._standings = rounds, Standings()
        self._held: tuple[DeviceId, ...] = ()  # in the open round

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        rounds = run.settings.round.quarantine
        return None if rounds is None or not run.method.combines else cls(run.store, rounds)

    def recall(self) -> None:
        self._standings = self._slot.read()

    def weigh(self, replies: Iterator[Reply[Any]], round_: RoundUpdates) -> Iterator[Reply[Any]]:
        self._held = held_of(self._standings.last, round_.devices)
        for reply in replies:
            update: Any = reply.update
            if reply.device in self._held and update is not None:
                update = replace(update, num_samples=0)
            yield replace(reply, update=update)

    def after_round(self, closed: ClosedRound) -> Iterable[str]:
        if closed.record.final_evaluation:
            return ()
        for device in self._held:
            closed.ledger.refuse("quarantined", device=device)
        known, lines = dict(self._standings.last), []
        for device, reply in closed.record.devices.items():
            if reply.step is None:
                continue
            standing = known.pop(device, Standing())
            now = standing.after(outlying=reply.step.is_outlying, enough=self._rounds)
            if now.held != standing.held:
                lines.append(self._line(device, held=now.held))
            if now != Standing():
                known[device] = now
        self._standings = Standings(known, self._standings.last)
        self._slot.write(self._standings)
        return lines

    def _line(self, device: DeviceId, *, held: bool) -> str:
        if held:
            return f"{device} is in quarantine: {self._rounds} rounds in a row were outlying"
        return f"{device} leaves quarantine: {self._rounds} rounds in a row were not outlying"

    def after_rollback(self, number: int) -> None:  # noqa: ARG002 - only the last round is ever rolled back
        self._standings = Standings(self._standings.before)
        self._slot.write(self._standings)

    def forget(self, device: DeviceId) -> None:
        known = [{one: found for one, found in part.items() if one != device} for part in self._parts]
        self._standings = Standings(*known)
        self._slot.write(self._standings)

    @property
    def _parts(self) -> tuple[dict[DeviceId, Standing], ...]:
        return self._standings.last, self._standings.before


def held_of(standings: Mapping[DeviceId, Standing], devices: tuple[DeviceId, ...]) -> tuple[DeviceId, ...]:
    """Return the devices of a round whose updates do not count: always less than half of them."""
    held = [device for device in devices if standings.get(device, Standing()).held]
    return tuple(held[: (len(devices) - 1) // 2])
