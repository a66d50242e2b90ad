"""Replies that are under way when a round ends, in the run's store: each is written once, however many rounds
end before it has arrived.

A snapshot of the world has a reply at several places, as what came of work, on its way, and as what may be
asked for again. There it is empty, and lies under its device's name and its turn.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from msgspec.structs import replace as replaced

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

Swap = Callable[[str, TransferKey, bytes], bytes]  # a device's reply to a task, for what stands in its place
_ELSEWHERE = b""


class StoredReplies:
    """The replies in a run's store; to be called inside `store.step()`.

    Args:
        store: of the run.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._there: set[str] = set()
        self._wanted: set[str] = set()

    def put(self, device: str, key: TransferKey, reply: bytes) -> bytes:
        """Write it, if it is not there; what stands for it elsewhere."""
        name = _name(device, key)
        if name not in self._there | self._wanted:
            self._store.put(name, reply)
        self._wanted.add(name)
        return _ELSEWHERE

    def drop_others(self) -> None:
        """Than those that were put since this was called last."""
        for name in self._there - self._wanted:
            self._store.drop(name)
        self._there, self._wanted = self._wanted, set()

    def get(self, device: str, key: TransferKey, reply: bytes) -> bytes:  # noqa: ARG002 - a `Swap`
        """Read it. Raises StoreError: it is not there."""
        name = _name(device, key)
        found = self._store.get(name)
        if found is None:
            raise StoreError(f"{self._store.path} is damaged: it has no {name}")
        self._there.add(name)
        return found


def swap_in_events(entries: Iterable[QueueEntry], swap: Swap) -> list[QueueEntry]:
    """What is to come, with other replies."""
    return [(time_s, number, _in_happening(one, swap)) for time_s, number, one in entries]


def swap_in_results(
    worked: Iterable[tuple[int, TrainingResult]], entries: Iterable[QueueEntry], swap: Swap
) -> list[tuple[int, TrainingResult]]:
    """What came of work whose end is among `entries`, with other replies."""
    ends = {number: one for _, number, one in entries if isinstance(one, TrainingDone)}
    return [
        (number, one)
        if one.reply is None
        else (number, replace(one, reply=swap(ends[number].device, ends[number].work.key, one.reply)))
        for number, one in worked
    ]


def swap_in_device(device: str, state: DeviceSnapshot, swap: Swap) -> DeviceSnapshot:
    """A device as it stands, with other replies."""
    return replace(state, replies=[(turn, _in_made(device, made, swap)) for turn, made in state.replies])


def _in_happening(happening: SimulationEvent, swap: Swap) -> SimulationEvent:
    match happening:
        case Uploads(device, made):
            return Uploads(device, _in_made(device, made, swap))
        case ReplyArrives(device, reply, work):
            return replaced(happening, reply=swap(device, work.key, reply))
        case _:
            return happening


def _in_made(device: str, made: FinishedReply, swap: Swap) -> FinishedReply:
    return replace(made, reply=swap(device, made.work.key, made.reply))


def _name(device: str, key: TransferKey) -> str:
    return f"reply {device} {key.round} {key.attempt}"
