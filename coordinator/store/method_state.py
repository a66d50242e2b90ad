"""The method's state in a run's store, written so that a round costs only what it changed.

A state may hold one model per device, of which a round changes a few (KAPC, FedAMP). Arrays of `APART_BYTES`
and more are stored in a separate table, each once, under the hash of their content; the state names them. New
arrays are written with the state, and arrays that it no longer names are deleted, in the same transaction.
Methods need no code for this: arrays are equal if their bits are equal.
"""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.store.run_store import RunStore
from fleetune.protocols.errors import PacketError, StoreError
from fleetune.protocols.freed_memory import LARGE_BYTES
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.update import codec

APART_BYTES = 64 * 1024
NAME_BYTES = 32

S = TypeVar("S")
Array = NDArray[Any]


def write_state(store: RunStore, state: object, spec: ModelSpec, *, keep_last: bool = False) -> None:
    """Replace the method's state, inside `store.step()`.

    Args:
        store: the run's store.
        state: the new state.
        spec: the model.
        keep_last: also keep the state that it replaces, for `read_state(before_last=True)`.
    """
    if keep_last:
        store.put("state-before", store.get("state") or b"")
        store.put("names-before", store.get("state-names") or b"")
    there = store.array_names()
    data, named = _encoded(store, state, spec, there)
    store.put("state", data)
    store.put("state-names", b"".join(sorted(named)))
    store.drop_arrays(there - named - _names(store.get("names-before")))


def _encoded(store: RunStore, state: object, spec: ModelSpec, there: set[bytes]) -> tuple[bytes, set[bytes]]:
    """Return a state's code and the names of its arrays; store those that are not `there` yet."""
    named = set[bytes]()

    def keep(array: Array) -> bytes | None:
        if array.nbytes < APART_BYTES:
            return None
        name = _name(array)
        if name not in there | named:
            store.add_array(name, stored_pieces(array, spec))
        named.add(name)
        return name

    return codec.encode(state, spec, keep=keep), named


def stored_pieces(message: object, spec: ModelSpec) -> list[bytes | memoryview]:
    """Return the bytes of an array or a reply in the store, without copies of a large model's arrays."""
    if 4 * spec.size >= LARGE_BYTES:
        return codec.plain_pieces(message, spec)
    return [codec.encode(message, spec, own=True)]


def forget_last(store: RunStore) -> None:
    """Drop the previous state, inside `store.step()`."""
    for name in ("state-before", "names-before"):
        store.put(name, b"")
    store.drop_arrays(store.array_names() - _names(store.get("state-names")))


def read_state(store: RunStore, kind: type[S], spec: ModelSpec, *, before_last: bool = False) -> S:
    """Read the method's state as it was written, bit for bit.

    With `before_last` it is the state that was kept when the present one replaced it.

    Raises:
        StoreError: the state is missing or damaged.
    """

    def stored_array(name: bytes) -> Array:
        array: Array = codec.decode(store.array(name), np.ndarray, spec, finite=False)
        if _name(array) != name:
            raise StoreError(f"array {name.hex()[:12]} is another one")
        return array

    data = store.get("state-before" if before_last else "state")
    if not data:
        raise StoreError(f"{store.path}: the method's state is missing")
    try:
        return codec.decode(data, kind, spec, finite=False, stored_array=stored_array)
    except (PacketError, StoreError) as problem:
        raise StoreError(
            f"{store.path}: the method's state is damaged ({problem}); start the run anew (--fresh)"
        ) from None


def change_states(store: RunStore, kind: type[S], spec: ModelSpec, change: Callable[[S], S]) -> bool:
    """Replace the state, and the one before it if it is kept, by what `change` returns for each.

    Call this inside `store.step()`. Returns True if the present state changed.

    Raises:
        StoreError: a state is missing or damaged.
    """
    there, wanted, before = store.array_names(), set[bytes](), store.get("state")
    for value, names, is_last in (("state", "state-names", False), ("state-before", "names-before", True)):
        if is_last and not store.get(value):
            continue
        changed = change(read_state(store, kind, spec, before_last=is_last))
        data, named = _encoded(store, changed, spec, there | wanted)
        store.put(value, data)
        store.put(names, b"".join(sorted(named)))
        wanted |= named
    store.drop_arrays(there - wanted)
    return store.get("state") != before


def _names(joined: bytes | None) -> set[bytes]:
    data = joined or b""
    return {data[at : at + NAME_BYTES] for at in range(0, len(data), NAME_BYTES)}


def _name(array: Array) -> bytes:
    """Return the name of an array: a hash of its type, shape and bits."""
    content = hashlib.blake2b(f"{array.dtype.str}{array.shape}".encode(), digest_size=NAME_BYTES)
    content.update(np.ascontiguousarray(array).view(np.uint8).data)
    return content.digest()
