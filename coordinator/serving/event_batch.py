"""Handles several events in one transaction; effects outside the store wait until it is committed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fleetune.coordinator.store.run_store import RunStore


class EventBatch:
    """Delays effects, such as messages to devices, until the steps that caused them are durable."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] | None = None

    def after_commit(self, effect: Callable[[], None]) -> None:
        """Call `effect` when the open batch is committed, or now if no batch is open."""
        if self._waiting is None:
            effect()
        else:
            self._waiting.append(effect)

    @contextmanager
    def committed(self, store: RunStore) -> Iterator[None]:
        """Run the steps inside this context in one transaction, then call the delayed effects in their order.

        Raises:
            StoreError: the transaction cannot be committed; no effect is called.
        """
        waiting: list[Callable[[], None]] = []
        self._waiting = waiting
        try:
            with store.step():
                yield
        finally:
            self._waiting = None
        for effect in waiting:
            effect()
