"""Groups of devices that the round engine needs at every event, updated incrementally.

An event changes one or two devices, so an update costs the same in a fleet of ten and of ten thousand.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId

if TYPE_CHECKING:
    from fleetune.coordinator.rounds.engine_state import EngineState, Member


class Groups:
    """Groups of devices of one `EngineState`, which updates them at each change.

    Attributes:
        eligible: could train now: connected, not left, not refusing.
        declined: declined the open or next round.
        missing: missed a deadline and have not answered since.
        idle: eligible, not in the open window, not declined.
        awaited: participants that may still answer, connected or not.
        at_work: awaited and connected.
        replied: participants with an accepted update.
        left: stopped early.
        left_there: stopped early and are connected.
        staying: take part in training, or would if they reconnected.
        unseen: have a report that the method has not seen.
        returning: were connected before a restart, take part in training, and have not reconnected yet.
        telling: take part in training, connected or not, and report that training would pay.
    """

    def __init__(
        self,
        members: "Mapping[DeviceId, Member]",
        state: "EngineState",
        pays: Callable[[DeviceReport], bool] = lambda _: False,
    ) -> None:
        self._pays = pays
        self.eligible: set[DeviceId] = set()
        self.declined: set[DeviceId] = set()
        self.missing: set[DeviceId] = set()
        self.idle: set[DeviceId] = set()
        self.awaited: set[DeviceId] = set()
        self.at_work: set[DeviceId] = set()
        self.replied: set[DeviceId] = set()
        self.left: set[DeviceId] = set()
        self.left_there: set[DeviceId] = set()
        self.staying: set[DeviceId] = set()
        self.unseen: set[DeviceId] = set()
        self.returning: set[DeviceId] = set()
        self.telling: set[DeviceId] = set()
        self._eligible_ascending: tuple[DeviceId, ...] | None = None
        self.place(members, state)

    @property
    def eligible_ascending(self) -> tuple[DeviceId, ...]:
        """Eligible device ids, ascending. Cached until the set changes."""
        if self._eligible_ascending is None:
            self._eligible_ascending = tuple(sorted(self.eligible))
        return self._eligible_ascending

    def place(self, devices: Iterable[DeviceId], state: "EngineState") -> None:
        """Put each of `devices` into exactly the groups that match its state."""
        number = state.round_attempt.number
        for device in devices:
            member = state.members[device]
            eligible = member.ready and member.stays
            declined = member.declined_round == number
            awaited = state.awaits(device)
            if eligible != (device in self.eligible):
                self._eligible_ascending = None
            _set(self.eligible, device, eligible)
            _set(self.missing, device, member.observed.missed > 0)
            _set(self.declined, device, declined)
            _set(self.idle, device, eligible and not declined and not state.takes_part(device))
            _set(self.awaited, device, awaited)
            _set(self.at_work, device, awaited and member.ready)
            _set(self.replied, device, member.answer == "update" and state.is_listed(device))
            _set(self.left, device, member.left)
            _set(self.left_there, device, member.left and member.ready)
            _set(self.staying, device, member.stays)
            _set(self.unseen, device, member.is_unseen)
            _set(self.returning, device, member.returning and member.stays)
            pays = member.report is not None and not member.trained and self._pays(member.report)
            _set(self.telling, device, member.stays and pays)


def _set(group: set[DeviceId], device: DeviceId, belongs: bool) -> None:
    if belongs:
        group.add(device)
    else:
        group.discard(device)
