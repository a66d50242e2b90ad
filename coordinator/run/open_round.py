"""The open round: its replies, and their rows in the round's record."""

from typing import Any

import msgspec

from fleetune.coordinator.rounds.engine_state import EngineState, RoundAttempt
from fleetune.coordinator.rounds.records import DeviceRound
from fleetune.coordinator.store.open_replies import OpenReplies
from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.round_cost import RoundCost
from fleetune.protocols.wire.payloads import Reply

_OPENED = "opened"  # key in the store


class OpenRound:
    """The open round of a run. Call all methods but `recall` inside `store.step()`.

    Args:
        store: store of the run.
        replies: holds the updates until they are aggregated.

    Attributes:
        rows: the record's row for each reply, by device.
        opened_at: when the round opened, on the run's clock.
    """

    def __init__(self, store: RunStore, replies: OpenReplies) -> None:
        self._store, self._replies = store, replies
        self.rows: dict[DeviceId, DeviceRound] = {}
        self._unwritten: set[DeviceId] = set()
        self.opened_at = 0.0

    def recall(self, state: EngineState) -> None:
        """Load the open round from the store.

        Raises:
            StoreError: the stored round is damaged.
        """
        self.rows = {} if state.stage == "finished" else self._store.device_rounds(state.round_attempt.number)
        opened = self._store.get(_OPENED)
        assert opened is not None, "it is written in the same transaction as the engine's state"
        self.opened_at = msgspec.json.decode(opened, type=float)

    def keep(self, reply: Reply[Any], data: bytes | None = None) -> None:
        """Store a reply until its update is aggregated.

        `data` is its encoded form, if that can be read without a reference.
        """
        self._replies.add(reply, data)

    def reply(self, device: DeviceId) -> Reply[Any]:
        """Return a copy of a device's reply that the caller may change.

        Raises:
            StoreError: there is no reply.
        """
        return self._replies.read(device)

    def put(self, device: DeviceId, row: DeviceRound) -> None:
        """Set the row of a device's reply in the record."""
        self.rows[device] = row
        self._unwritten.add(device)

    def note_late(
        self, device: DeviceId, round_attempt: RoundAttempt, open_attempt: RoundAttempt, actual: RoundCost
    ) -> None:
        """Add costs that a device reports after its reply has arrived, to an open or a closed round."""
        if device in self.rows and round_attempt == open_attempt:
            self.put(device, self.rows[device].with_late_cost(actual))
            return
        row = self._store.device_round(device, *round_attempt)
        if row is not None:
            with self._store.step():
                self._store.put_device_rounds(*round_attempt, {device: row.with_late_cost(actual)})

    def keep_only(self, devices: tuple[DeviceId, ...], number: int) -> dict[DeviceId, DeviceRound]:
        """Drop the rows of replies that the closing round leaves out; return the remaining rows."""
        rows = {device: self.rows[device] for device in devices}
        if self.rows.keys() != rows.keys():
            self._store.drop_device_rounds(number)
            self.rows, self._unwritten = rows, set(devices)
        return rows

    def write(self, round_attempt: RoundAttempt) -> None:
        """Write the rows of this attempt that are new or changed."""
        rows = {device: self.rows[device] for device in sorted(self._unwritten)}
        self._store.put_device_rounds(*round_attempt, rows)
        self._unwritten = set()

    def write_opened(self) -> None:
        """Store the time at which the round opened."""
        self._store.put(_OPENED, msgspec.json.encode(self.opened_at))

    def drop(self) -> None:
        """Forget the replies: the round is closed or abandoned."""
        self.rows, self._unwritten = {}, set()
        self._replies.drop()
