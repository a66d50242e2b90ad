"""How a simulated world stands when a round has ended, in the run's store beside what the coordinator keeps.

It is written in the transaction of the round itself, so that both are there or neither. Of devices it holds
those that have changed; the others are as they are at the start of the run. Replies lie beside it, see
`replies_kept`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import msgspec

from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import StoreError
from fleetune.tools.simulator.checkpoint.stored_replies import (
    StoredReplies,
    swap_in_device,
    swap_in_events,
    swap_in_results,
)
from fleetune.tools.simulator.event_queue import QueueEntry
from fleetune.tools.simulator.fleet_streams import FleetStreamsState
from fleetune.tools.simulator.jobs import TrainingResult
from fleetune.tools.simulator.simulated_device import DeviceSnapshot, SimulatedDevice

FORMAT = 2  # another one is not gone on with
STOPPED = "stopped by its caller"  # why such a run has ended
_SNAPSHOT, _PLAYER = "simulated", "simulated "  # names in the store; the latter with a device's


@dataclass(frozen=True)
class Snapshot:
    """A simulated world, but for its devices.

    Attributes:
        layout: in which it is written.
        closed: how many rounds have ended, the final evaluation among them.
        now: on the virtual clock.
        agenda: what is still to come.
        worked: what came of tasks that late devices are still at on the virtual clock, by their number on
            the agenda.
        next_tick: when the engine is woken next; None: it has not asked.
        idle_stretches: how often devices came and went without a round.
        tasks_made: papers' bytes of the tasks that are on their way, by device, round and attempt.
        intake: where data grow, what has come and how devices did; None: they do not.
    """

    layout: int
    closed: int
    now: float
    agenda: list[QueueEntry]
    worked: list[tuple[int, TrainingResult]]
    next_tick: float | None
    idle_stretches: int
    tasks_made: list[tuple[str, int, int, float]]
    intake: FleetStreamsState | None = None


_decoder = msgspec.msgpack.Decoder(Snapshot)
_player_decoder = msgspec.msgpack.Decoder(DeviceSnapshot)


@dataclass(frozen=True)
class _Layout:
    layout: int


def write_snapshot(
    store: RunStore, snapshot: Snapshot, players: Iterable[SimulatedDevice], replies: StoredReplies
) -> None:
    """Write it down, and these devices; inside `store.step()`."""
    encode = msgspec.msgpack.encode
    worked = swap_in_results(snapshot.worked, snapshot.agenda, replies.put)
    lighter = replace(snapshot, worked=worked, agenda=swap_in_events(snapshot.agenda, replies.put))
    store.put(_SNAPSHOT, encode(lighter))
    for player in players:
        store.put(_PLAYER + player.name, encode(swap_in_device(player.name, player.state, replies.put)))


def with_replies(snapshot: Snapshot, replies: StoredReplies) -> Snapshot:
    """What was read, with its replies. Raises StoreError: one is not there."""
    worked = swap_in_results(snapshot.worked, snapshot.agenda, replies.get)
    return replace(snapshot, worked=worked, agenda=swap_in_events(snapshot.agenda, replies.get))


def read_snapshot(store: RunStore) -> Snapshot | None:
    """What was written last, its replies left empty; None: nothing, or in a layout of another release.

    Raises:
        StoreError: it is damaged.
    """
    data = store.get(_SNAPSHOT)
    try:
        if data is None or msgspec.msgpack.decode(data, type=_Layout).layout != FORMAT:
            return None
        return _decoder.decode(data)
    except msgspec.MsgspecError as problem:
        raise StoreError(f"{store.path} is damaged: {problem}") from None


def read_devices(
    store: RunStore, players: Iterable[SimulatedDevice], replies: StoredReplies
) -> Iterator[tuple[SimulatedDevice, DeviceSnapshot]]:
    """Those of the devices that had changed, with what they were.

    Raises:
        StoreError: it is damaged.
    """
    for player in players:
        data = store.get(_PLAYER + player.name)
        if data is not None:
            try:
                state = _player_decoder.decode(data)
            except msgspec.MsgspecError as problem:
                raise StoreError(f"{store.path} is damaged: {problem}") from None
            yield player, swap_in_device(player.name, state, replies.get)
