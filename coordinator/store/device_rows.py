"""Stores rows of one device each, so that a step of the run writes only the devices that it changed.

The engine's members and each device's traffic are read completely when a run is resumed. The rest of engine
and ledger is one small value each. The open round's participants are written when they change.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import msgspec

from fleetune.coordinator.rounds.engine_state import EngineState, Member
from fleetune.coordinator.rounds.records import Ledger, Traffic
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import StoreError
from fleetune.protocols.method.method import DeviceId

ENGINE, PARTICIPANTS, LEDGER = "engine", "participants", "ledger"

_member = msgspec.msgpack.Decoder(Member)
_traffic = msgspec.json.Decoder(Traffic)


class DeviceRows:
    """Writes the changed parts of the engine's state and the ledger; one object for each store."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._participants: tuple[DeviceId, ...] | None = None
        self._ledger = b""

    def write(self, state: EngineState, ledger: Ledger, touched: Iterable[DeviceId]) -> None:
        """Write the changed parts of engine and ledger, inside `store.step()`.

        Args:
            state: of the engine; the members written are those that changed since this was called last.
            ledger: of the run.
            touched: devices whose traffic changed since then.
        """
        encode = msgspec.msgpack.encode
        members = [(name, encode(state.members[name])) for name in sorted(state.take_changed())]
        self._store.put_rows("member", members)
        self._store.put(ENGINE, encode(replace(state, members={}, participants=())))
        if state.participants is not self._participants:
            self._store.put(PARTICIPANTS, encode(state.participants))
            self._participants = state.participants
        self.write_traffic(ledger, touched)
        counts = msgspec.json.encode(msgspec.structs.replace(ledger, traffic={}))
        if counts != self._ledger:
            self._store.put(LEDGER, counts)
            self._ledger = counts

    def write_traffic(self, ledger: Ledger, touched: Iterable[DeviceId]) -> None:
        """Write the traffic of these devices, inside `store.step()`."""
        rows = [(name, msgspec.json.encode(ledger.traffic[name])) for name in sorted(touched)]
        self._store.put_rows("traffic", rows)


def read_engine(store: RunStore) -> EngineState | None:
    """Return the stored state of the engine; None if none was stored.

    Raises:
        StoreError: it is damaged.
    """
    stored, participants = store.get(ENGINE), store.get(PARTICIPANTS)
    if stored is None:
        return None
    with _undamaged(store):
        scalars = msgspec.msgpack.decode(stored, type=EngineState)
        members = {name: _member.decode(data) for name, data in store.rows("member")}
        listed = msgspec.msgpack.decode(participants or b"\x90", type=tuple[DeviceId, ...])
    return replace(scalars, members=members, participants=listed)


def read_ledger(store: RunStore) -> Ledger:
    """Read the ledger as it was written; a new one if it never was.

    Raises:
        StoreError: it is damaged.
    """
    stored = store.get(LEDGER)
    with _undamaged(store):
        ledger = Ledger() if stored is None else msgspec.json.decode(stored, type=Ledger)
        ledger.traffic = {name: _traffic.decode(data) for name, data in store.rows("traffic")}
    return ledger


@contextmanager
def _undamaged(store: RunStore) -> Iterator[None]:
    try:
        yield
    except msgspec.MsgspecError as problem:
        raise StoreError(f"{store.path} is damaged: {problem}") from None
