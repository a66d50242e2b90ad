"""The versions of a run's shared model that are out or on trial: kept in the store, and given to devices.

What changes is written in the step of the store that closes a round, with the round: a coordinator that is
killed goes on with the same roll-out, and plans the same tasks again.
"""

from collections.abc import Iterable, Mapping

import msgspec
import numpy as np
from msgspec import UNSET

from fleetune.coordinator.rounds.records import DeviceRound
from fleetune.coordinator.rounds.rollout import Rollout, after_round, heard, taken_back
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.adoption import AdoptionSection
from fleetune.protocols.wire.release import Release, ReleaseWord, Version

_ROLLOUT, _HOLDS = "rollout", "release-holds"
_Held = dict[DeviceId, tuple[int, ...]]


class ReleaseStore:
    """Of one run; all but `release` and `recall` inside `store.step()`.

    Args:
        store: of the run.
        rule: its [adoption] section.
        key: of its draws of canaries.

    Attributes:
        rollout: as it stands.
    """

    def __init__(self, store: RunStore, rule: AdoptionSection, key: Key) -> None:
        self._store, self._rule, self._key = store, rule, key
        self.rollout = Rollout()
        self._holds: _Held = {}

    def recall(self) -> None:
        """Take over what the store holds."""
        self.rollout = read_rollout(self._store) or Rollout()
        held = self._store.get(_HOLDS)
        self._holds = {} if held is None else msgspec.json.decode(held, type=_Held)

    def release(self, device: DeviceId) -> Release:
        """What a device may serve, with the weights that it has not said that it holds."""
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
        """A round has closed; a line for people, "" for none.

        Args:
            number: of the round.
            now: on the run's clock.
            replies: that it closed with.
            devices: that may be canaries.
            shared: the shared model after it, its first entries those that train.
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

    def take_back(self, number: int) -> None:
        """A round that had closed never was."""
        self._keep(taken_back(self.rollout, number))

    def _keep(self, rollout: Rollout) -> None:
        before, self.rollout = self.rollout, rollout
        wanted = {rollout.approved, rollout.trial} - {0}
        for number in {before.approved, before.trial} - wanted - {0}:
            self._store.drop(_name(number))
        holds = {device: tuple(wanted.intersection(held)) for device, held in self._holds.items()}
        self._holds = {device: held for device, held in holds.items() if held}
        self._store.put(_ROLLOUT, msgspec.json.encode(rollout))
        self._store.put(_HOLDS, msgspec.json.encode(self._holds))

    def _version(self, number: int, holds: tuple[int, ...]) -> Version:
        if not number or number in holds:
            return Version(number)
        data = self._store.get(_name(number))
        assert data is not None, "it is written and dropped with the roll-out's state"
        return Version(number, np.frombuffer(data, np.float32))


def read_rollout(store: RunStore) -> Rollout | None:
    """How a run's roll-out stands; None: it has none."""
    data = store.get(_ROLLOUT)
    return None if data is None else msgspec.json.decode(data, type=Rollout)


def _name(number: int) -> str:
    return f"release-{number}"
