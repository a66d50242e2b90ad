"""Stores the present problems of a run, for `edge-coordinator status`."""

import msgspec

from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.one_line import mentions

TROUBLES = "troubles"


def read_troubles(store: RunStore) -> dict[str, str]:
    """Return a line for each problem, by its subject."""
    data = store.get(TROUBLES)
    return {} if data is None else msgspec.json.decode(data, type=dict[str, str])


def note_trouble(store: RunStore, about: str, line: str | None) -> None:
    """Store a problem, or None when it is over. Raises StoreError."""
    known = read_troubles(store)
    found = {key: one for key, one in known.items() if key != about} | ({} if line is None else {about: line})
    if found != known:
        with store.step():
            store.put(TROUBLES, msgspec.json.encode(found))


def forget_troubles_of(store: RunStore, device: str) -> None:
    """Delete the problems that name a device. Raises StoreError."""
    for about, line in read_troubles(store).items():
        if mentions(f"{about} {line}", device):
            note_trouble(store, about, None)


def forget_troubles(store: RunStore) -> None:
    """Delete the problems that the last process stored. Raises StoreError."""
    if store.get(TROUBLES) is not None:
        with store.step():
            store.drop(TROUBLES)
