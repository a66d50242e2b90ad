"""Queues that write samples to the store in the background: producers never wait for the disk."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Generic, TypeVar

from fleetune.edge_agent.stream.sample import Label, Sample
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.protocols.errors import StoreError

MAX_WAITING_BYTES = 2**24
RETRY_S = 5.0  # pause after the disk was full
OVERHEAD_BYTES = 500  # approximate memory of a waiting item, besides its content
_BATCH = 256
_POLL_S = 0.2

Item = TypeVar("Item")


class WriteQueue(Generic[Item]):
    """A queue of items to be written to disk, in order. Any thread may add items; one thread runs the queue.

    Items that arrive while the disk is busy are written in one batch. A batch has items of one type, so that
    it is one transaction. When the disk is full, the batch stays and is tried again after `RETRY_S`.

    Args:
        write: writes a batch, in full or not at all; raises StoreError.
        num_bytes: function that returns the size of an item's content.
        on_error: called with the message of each failed attempt.
        max_bytes: number of bytes that may wait; `put` refuses more.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Item]], None],
        num_bytes: Callable[[Item], int],
        on_error: Callable[[str], None],
        max_bytes: int,
    ) -> None:
        self._write, self._on_error = write, on_error
        self._item_bytes, self._max_bytes = num_bytes, max_bytes
        self._waiting: deque[Item] = deque()
        self._num_bytes = 0
        self._ending = False
        self._changed = threading.Condition()

    def __len__(self) -> int:
        """Return the number of waiting items, including those that are being written."""
        return len(self._waiting)

    def put(self, item: Item, wait_s: float = 0.0) -> bool:
        """Add an item, and return True; False if there was no space for it within `wait_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_bytes < self._max_bytes, wait_s):
                return False
            self._waiting.append(item)
            self._num_bytes += self._item_bytes(item) + OVERHEAD_BYTES
            self._changed.notify_all()
        return True

    def put_until(self, item: Item, stopped: threading.Event) -> None:
        """Add an item as soon as there is space for it, unless `stopped` is set first."""
        while not stopped.is_set() and not self.put(item, _POLL_S):
            pass

    def wait_until_written(self, timeout_s: float | None = None) -> bool:
        """Wait until the queue is empty, and return True; False if it was not within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, timeout_s)

    def end(self) -> None:
        """Make `run` return once it has written all items."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()

    def run(self, stopped: threading.Event) -> None:
        """Write items until `stopped` is set, then the remaining ones, unless the disk is full."""
        while True:
            batch = self._next_batch()
            if not batch and (self._ending or stopped.is_set()):
                return
            if batch and not self._write_batch(batch) and stopped.wait(RETRY_S):
                return

    def _next_batch(self) -> list[Item]:
        """Return the first items, all of one type. They stay in the queue until they are written."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting) or self._ending, _POLL_S)
            if not self._waiting:
                return []
            first = type(self._waiting[0])
            return list(islice(takewhile(lambda item: type(item) is first, self._waiting), _BATCH))

    def _write_batch(self, batch: list[Item]) -> bool:
        try:
            self._write(batch)
        except StoreError as problem:
            self._on_error(str(problem))
            return False
        with self._changed:
            for item in batch:
                self._waiting.popleft()
                self._num_bytes -= self._item_bytes(item) + OVERHEAD_BYTES
            self._changed.notify_all()
        return True


@dataclass(frozen=True)
class NamedLabel:
    """A label for the sample with this name."""

    name: str
    label: Label


class SampleQueue(WriteQueue[Sample | NamedLabel]):
    """A queue of samples and labels for a device's store.

    Args:
        store: the device's store.
        max_bytes: approximate number of bytes of inputs that may wait.
    """

    def __init__(self, store: SampleStore, max_bytes: int = MAX_WAITING_BYTES) -> None:
        super().__init__(
            self._keep, _input_bytes, lambda problem: store.refusals.add("disk", problem), max_bytes
        )
        self._store = store

    def _keep(self, batch: Sequence[Sample | NamedLabel]) -> None:
        """Write a batch that holds either samples or labels."""
        samples = [one for one in batch if isinstance(one, Sample)]
        labels = [(one.name, one.label) for one in batch if isinstance(one, NamedLabel)]
        if samples:
            self._store.add(samples)
        if labels:
            self._store.label(labels)


def _input_bytes(item: Sample | NamedLabel) -> int:
    return item.x.nbytes if isinstance(item, Sample) else 0
