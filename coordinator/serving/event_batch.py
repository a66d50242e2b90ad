"""Several events in one transaction: what they make us say waits until it is committed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fleetune.coordinator.store.run_store import RunStore


class EventBatch:
    """Words that are held back until what they tell of is durable."""

    def __init__(self) -> None:
        self._held: list[Callable[[], None]] | None = None

    def say(self, word: Callable[[], None]) -> None:
        """Do it when all that was written so far is committed: at once, or when the burst is over."""
        if self._held is None:
            word()
        else:
            self._held.append(word)

    @contextmanager
    def committed(self, store: RunStore) -> Iterator[None]:
        """All steps inside are one transaction; then what was said inside is said.

        Raises:
            StoreError: it cannot be committed; nothing was said.
        """
        held: list[Callable[[], None]] = []
        self._held = held
        try:
            with store.step():
                yield
        finally:
            self._held = None
        for word in held:
            word()
