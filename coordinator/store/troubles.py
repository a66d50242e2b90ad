"""Present problems of a run; `edge-coordinator status`, another process, reads them."""

import msgspec

from fleetune.coordinator.store.run_store import RunStore

TROUBLES = "troubles"


def read_troubles(store: RunStore) -> dict[str, str]:
    """A line for each trouble, by what it concerns."""
    data = store.get(TROUBLES)
    return {} if data is None else msgspec.json.decode(data, type=dict[str, str])


def note_trouble(store: RunStore, about: str, line: str | None) -> None:
    """Note a trouble, or (None) that it is over. Raises StoreError."""
    known = read_troubles(store)
    found = {key: one for key, one in known.items() if key != about} | ({} if line is None else {about: line})
    if found != known:
        with store.step():
            store.put(TROUBLES, msgspec.json.encode(found))


def forget_troubles(store: RunStore) -> None:
    """Delete the problems that the last process noted. Raises StoreError."""
    if store.get(TROUBLES) is not None:
        with store.step():
            store.drop(TROUBLES)
