"""The simulation's state at the end of a round, in the run's store next to the coordinator's state.

The state is written in the round's own transaction. Only devices that changed are stored; other devices are
still in their initial state. Replies are stored separately, see `stored_replies`.
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
from fleetune.tools.simulator.simulated_device import DeviceSnapshot, Fleet, SimulatedDevice

FORMAT = 3  # version of the stored format; runs with another version are refused
STOPPED = "stopped by its caller"  # the reason why such a run has ended
# names in the store; a device's name is appended to the latter
_SNAPSHOT, _DEVICE = "simulated", "simulated "


@dataclass(frozen=True)
class Snapshot:
    """State of a simulation without its devices.

    Attributes:
        format: version of the format, `FORMAT`.
        num_closed: number of ended rounds, the final evaluation included.
        now: time on the virtual clock.
        events: future events.
        results: results of training that ends later on the virtual clock, by number in the event queue.
        next_wake: time of the engine's next call; None if it requested none.
        idle_periods: see `Availability`.
        tasks_made: bytes, as papers count them, of the tasks in flight, by device, round and attempt.
        streams: deliveries and scores; None if the devices' data do not grow.
    """

    format: int
    num_closed: int
    now: float
    events: list[QueueEntry]
    results: list[tuple[int, TrainingResult]]
    next_wake: float | None
    idle_periods: int
    tasks_made: list[tuple[str, int, int, float]]
    streams: FleetStreamsState | None = None


_decoder = msgspec.msgpack.Decoder(Snapshot)
_device_decoder = msgspec.msgpack.Decoder(DeviceSnapshot)


@dataclass(frozen=True)
class _Version:
    format: int = 0
    layout: int = 0  # the key's name before version 3


def write_snapshot(
    store: RunStore, snapshot: Snapshot, devices: Iterable[SimulatedDevice], replies: StoredReplies
) -> None:
    """Store a snapshot and these devices, inside `store.step()`."""
    encode = msgspec.msgpack.encode
    results = swap_in_results(snapshot.results, snapshot.events, replies.put)
    lighter = replace(snapshot, results=results, events=swap_in_events(snapshot.events, replies.put))
    store.put(_SNAPSHOT, encode(lighter))
    for device in devices:
        store.put(_DEVICE + device.name, encode(swap_in_device(device.name, device.state, replies.put)))


def with_replies(snapshot: Snapshot, replies: StoredReplies) -> Snapshot:
    """Return the snapshot with its replies. Raises StoreError if a reply is missing."""
    results = swap_in_results(snapshot.results, snapshot.events, replies.get)
    return replace(snapshot, results=results, events=swap_in_events(snapshot.events, replies.get))


def read_snapshot(store: RunStore) -> Snapshot | None:
    """Return the latest snapshot without its replies; None if there is none.

    Raises:
        StoreError: the snapshot is damaged, or of another version.
    """
    data = store.get(_SNAPSHOT)
    if data is None:
        return None
    try:
        version = msgspec.msgpack.decode(data, type=_Version)
        if (found := version.format or version.layout) != FORMAT:
            raise StoreError(
                f"{store.path} is a simulation of version {found}, and this release reads version {FORMAT};"
                " --fresh simulates it again"
            )
        return _decoder.decode(data)
    except msgspec.MsgspecError as problem:
        raise StoreError(f"{store.path} is damaged: {problem}") from None


def read_devices(
    store: RunStore, fleet: Fleet, replies: StoredReplies
) -> Iterator[tuple[SimulatedDevice, DeviceSnapshot]]:
    """Yield each changed device with its stored state.

    Raises:
        StoreError: the stored state is damaged.
    """
    for device in fleet:
        data = store.get(_DEVICE + device.name)
        if data is not None:
            try:
                state = _device_decoder.decode(data)
            except msgspec.MsgspecError as problem:
                raise StoreError(f"{store.path} is damaged: {problem}") from None
            yield device, swap_in_device(device.name, state, replies.get)
