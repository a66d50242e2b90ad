"""Stores replies in flight when a round ends: each reply once, even if several rounds end meanwhile.

A snapshot has a reply in several places: as the result of training, in transfer, and among replies that may
be sent again. There the reply is empty. Its content is stored under its device's name and its (round,
attempt).
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from msgspec.structs import replace as replace_struct

from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import StoreError
from fleetune.protocols.wire.messages import TransferKey
from fleetune.tools.simulator.event_queue import (
    QueueEntry,
    ReplyArrives,
    SimulationEvent,
    TrainingDone,
    Uploads,
)
from fleetune.tools.simulator.jobs import TrainingResult
from fleetune.tools.simulator.simulated_device import DeviceSnapshot, FinishedReply

Swap = Callable[[str, TransferKey, bytes], bytes]  # maps a device's reply to a task to its replacement
_ELSEWHERE = b""


class StoredReplies:
    """The replies in a run's store; called inside `store.step()`.

    Args:
        store: store of the run.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._stored: set[str] = set()
        self._wanted: set[str] = set()

    def put(self, device: str, key: TransferKey, reply: bytes) -> bytes:
        """Store a reply unless it is already stored; return the placeholder for it."""
        name = _name(device, key)
        if name not in self._stored | self._wanted:
            self._store.put(name, reply)
        self._wanted.add(name)
        return _ELSEWHERE

    def drop_others(self) -> None:
        """Delete replies that were not put since the last call."""
        for name in self._stored - self._wanted:
            self._store.drop(name)
        self._stored, self._wanted = self._wanted, set()

    def get(self, device: str, key: TransferKey, reply: bytes) -> bytes:  # noqa: ARG002 - a `Swap`
        """Return a stored reply. Raises StoreError if it is missing."""
        name = _name(device, key)
        found = self._store.get(name)
        if found is None:
            raise StoreError(
                f"{self._store.path} is damaged: the entry {name} is missing; --fresh simulates the run again"
            )
        self._stored.add(name)
        return found


def swap_in_events(entries: Iterable[QueueEntry], swap: Swap) -> list[QueueEntry]:
    """Return events with their replies replaced by `swap`."""
    return [(time_s, number, _in_event(one, swap)) for time_s, number, one in entries]


def swap_in_results(
    results: Iterable[tuple[int, TrainingResult]], entries: Iterable[QueueEntry], swap: Swap
) -> list[tuple[int, TrainingResult]]:
    """Return results of training, whose ends are among `entries`, with their replies replaced."""
    ends = {number: one for _, number, one in entries if isinstance(one, TrainingDone)}
    return [
        (number, one)
        if one.reply is None
        else (number, replace(one, reply=swap(ends[number].device, ends[number].work.key, one.reply)))
        for number, one in results
    ]


def swap_in_device(device: str, state: DeviceSnapshot, swap: Swap) -> DeviceSnapshot:
    """Return a device's state with its replies replaced."""
    return replace(
        state,
        replies=[(round_attempt, _in_made(device, made, swap)) for round_attempt, made in state.replies],
    )


def _in_event(event: SimulationEvent, swap: Swap) -> SimulationEvent:
    match event:
        case Uploads(device, made):
            return Uploads(device, _in_made(device, made, swap))
        case ReplyArrives(device, reply, work):
            return replace_struct(event, reply=swap(device, work.key, reply))
        case _:
            return event


def _in_made(device: str, made: FinishedReply, swap: Swap) -> FinishedReply:
    return replace(made, reply=swap(device, made.work.key, made.reply))


def _name(device: str, key: TransferKey) -> str:
    return f"reply {device} {key.round} {key.attempt}"
