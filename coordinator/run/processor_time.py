"""Processor time of a run, summed over all processes that worked on it one after the other."""

import os
from contextlib import suppress

from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import StoreError

_NAME = "processor_s"  # key in the store


class ProcessorTime:
    """Processor time of this process since it opened a run, and of its children that have ended.

    Args:
        store: the run's store.
    """

    def __init__(self, store: RunStore) -> None:
        self._store, self._began_s, self._before_s = store, _used_s(), self.stored_s(store)

    @staticmethod
    def stored_s(store: RunStore) -> float:
        """Return the processor time that all processes stored, in seconds."""
        return float(store.get(_NAME) or 0.0)

    def note(self) -> None:
        """Store this process's time so far; does nothing if the disk is full."""
        with suppress(StoreError), self._store.step():
            self._store.put(_NAME, str(self._before_s + _used_s() - self._began_s).encode())


def _used_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
