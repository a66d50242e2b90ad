"""Releases: the versions of a run's shared model that are deployed or on trial, kept in the store and sent to
devices.

Changes are written in the step of the store that closes a round. A coordinator that is killed goes on with
the same roll-out, and plans the same tasks again.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

import msgspec
import numpy as np
from msgspec import UNSET

from fleetune.coordinator.extensions.extension import ClosedRound, Extension, RunContext, StateSlot
from fleetune.coordinator.extensions.rollout import Rollout, after_round, heard, rolled_back
from fleetune.coordinator.rounds.records import DeviceRound
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.wire.payloads import Assignment, run_key
from fleetune.protocols.wire.release import Release, ReleaseWord, Version

_ROLLOUT, _HOLDS = "rollout", "release-holds"
_Held = dict[DeviceId, tuple[int, ...]]


class Releases(Extension):
    """Rolls versions of the shared model out: to canaries first, then to all devices.

    Args:
        run: of which it uses the store, the method, the engine's state and [adoption].

    Attributes:
        rollout: as it stands.
    """

    slots = (_ROLLOUT, _HOLDS)

    def __init__(self, run: RunContext) -> None:
        self._store, self._method, self._state = run.store, run.method, run.state
        self._rule, self._key = run.settings.adoption, run_key(run.settings.run.seed).child("canary")
        self._rollouts = StateSlot(run.store, _ROLLOUT, Rollout, Rollout())
        self._held = StateSlot(run.store, _HOLDS, _Held, {})
        self.rollout = Rollout()
        self._holds: _Held = {}

    @classmethod
    def of_run(cls, run: RunContext) -> Self | None:
        return cls(run) if run.settings.adoption.canary else None

    def recall(self) -> None:
        self.rollout, self._holds = self._rollouts.read(), self._held.read()

    def before_send(self, assignment: Assignment[Any]) -> Assignment[Any]:
        return replace(assignment, release=self.release(assignment.device))

    def after_round(self, closed: ClosedRound) -> Iterable[str]:
        record, members = closed.record, self._state.members.items()
        if record.final_evaluation:
            return ()
        there = [device for device, member in members if member.refusal is None and member.report is not None]
        shared = self._method.shared_model(closed.method_state)[: self._method.spec.num_parameters]
        line = self.closed(record.number, closed.now, record.devices, there, shared)
        return (line,) if line else ()

    def release(self, device: DeviceId) -> Release:
        """Return the version that a device may deploy, with weights unless the device has reported that it
        has them.
        """
        rollout, holds = self.rollout, self._holds.get(device, ())
        is_canary = rollout.trial and device in rollout.canaries
        return Release(
            self._version(rollout.approved, holds),
            self._version(rollout.trial, holds) if is_canary else UNSET,
        )

    def closed(
        self,
        number: int,
        now: float,
        replies: Mapping[DeviceId, DeviceRound],
        devices: Iterable[DeviceId],
        shared: FlatArray,
    ) -> str:
        """Process a closed round; return a message for the log, or "".

        Args:
            number: number of the round.
            now: on the run's clock.
            replies: the accepted replies.
            devices: possible canaries.
            shared: the shared model after the round; its first entries are the trained ones.
        """
        rollout = self.rollout
        for device, reply in sorted(replies.items()):
            word = reply.measures.release
            if not isinstance(word, ReleaseWord):
                continue
            self._holds[device] = word.holds
            if word.found is not UNSET:
                rollout = heard(rollout, device, word.found)
        rollout, line = after_round(rollout, number, now, sorted(devices), self._rule, self._key)
        if rollout.trial == number:
            self._store.put(_name(number), np.ascontiguousarray(shared, np.float32).tobytes())
        self._keep(rollout)
        return line

    def after_rollback(self, number: int) -> None:
        self._keep(rolled_back(self.rollout, number))

    def forget(self, device: DeviceId) -> None:
        rollout = self.rollout
        canaries = tuple(one for one in rollout.canaries if one != device)
        reporting = {one: found for one, found in rollout.reporting.items() if one != device}
        self._holds.pop(device, None)
        self._keep(msgspec.structs.replace(rollout, canaries=canaries, reporting=reporting))

    def _keep(self, rollout: Rollout) -> None:
        before, self.rollout = self.rollout, rollout
        wanted = {rollout.approved, rollout.trial} - {0}
        for number in {before.approved, before.trial} - wanted - {0}:
            self._store.drop(_name(number))
        holds = {device: tuple(wanted.intersection(held)) for device, held in self._holds.items()}
        self._holds = {device: held for device, held in holds.items() if held}
        self._rollouts.write(rollout)
        self._held.write(self._holds)

    def _version(self, number: int, holds: tuple[int, ...]) -> Version:
        if not number or number in holds:
            return Version(number)
        data = self._store.get(_name(number))
        assert data is not None, "it is written and dropped with the roll-out's state"
        return Version(number, np.frombuffer(data, np.float32))


def read_rollout(store: RunStore) -> Rollout | None:
    """Return the state of a run's roll-out; None if the run has none."""
    data = store.get(_ROLLOUT)
    return None if data is None else msgspec.json.decode(data, type=Rollout)


def rollout_in(store: RunStore, rule: AdoptionSection) -> Rollout | None:
    """Return the state of a run's roll-out, or its initial state; None if the run has none."""
    return (read_rollout(store) or Rollout()) if rule.canary else None


def _name(number: int) -> str:
    return f"release-{number}"
