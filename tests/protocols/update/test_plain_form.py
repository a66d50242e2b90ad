"""States that a simulation keeps while it lasts: as they lie in memory, never off the wire."""

from dataclasses import dataclass

import numpy as np
import pytest
from tests.conftest import tiny_spec
from tests.helpers.errors import raises

from fleetune.protocols.errors import PacketCorrupt, PacketError, PacketTruncated, PacketVersion
from fleetune.protocols.method.averaging import Task
from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Neurons

SPEC = tiny_spec()
LIMIT = codec.payload_limit(SPEC)


@dataclass(frozen=True)
class State:
    weights: FlatArray
    flags: MaskArray
    sums: FlatArray
    patch: Patch
    note: bytes
    nothing: FlatArray


def a_state(weights):
    mask = np.arange(SPEC.num_parameters) % 3 == 0
    sums = np.linspace(-1, 1, 6).reshape(2, 3)[:, ::-1]  # neither flat nor in order
    patch = Patch.of(weights, Entries(mask), SPEC)
    return State(weights, mask, sums, patch, b"FLTN", np.zeros((0, 2), np.float32))


def test_a_state_comes_back_to_the_bit_whatever_is_in_it(weights):
    weights = weights.copy()
    weights[:3] = np.nan, np.inf, -0.0
    state = a_state(weights)
    back = codec.decode(codec.encode(state, SPEC, own=True, plain=True), State, SPEC, finite=False)
    for name in ("weights", "flags", "sums", "nothing"):
        ours, theirs = getattr(state, name), getattr(back, name)
        assert (theirs.tobytes(), theirs.shape, theirs.dtype) == (ours.tobytes(), ours.shape, ours.dtype)
        theirs.reshape(-1)[:1] = 0  # the reader's own, to change
    assert back.patch.values.tobytes() == state.patch.values.tobytes()
    assert back.note == b"FLTN"


def test_its_bytes_are_those_in_memory(weights):
    assert weights.tobytes() in codec.encode(weights, SPEC, own=True, plain=True)
    assert weights.tobytes() not in codec.encode(weights, SPEC, own=True)


def test_every_flipped_bit_and_every_cut_is_found(weights):
    data = codec.encode(a_state(weights), SPEC, own=True, plain=True)
    for place in range(8, len(data), 7):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(PacketError):
            codec.decode(bytes(damaged), State, SPEC, finite=False)
    for length in range(len(data)):
        with pytest.raises(PacketTruncated):
            codec.decode(data[:length], State, SPEC, finite=False)


def test_it_is_not_read_off_the_wire(weights):
    task = Task(Patch.of(weights, Neurons(0.5, 7), SPEC))
    data = codec.encode(task, SPEC, own=True, plain=True)
    assert codec.decode(data, Task, SPEC).patch.values.tobytes() == task.patch.values.tobytes()
    with pytest.raises(PacketVersion):
        codec.decode(data, Task, SPEC, limit=LIMIT)


def test_nor_are_its_arrays_in_packets_of_other_versions(weights, monkeypatch):
    whole = codec.encode(weights, SPEC)
    monkeypatch.setattr(codec, "dtype_name", lambda _: "=f4")
    forged = codec.encode(weights, SPEC)
    assert codec.decode(whole, np.ndarray, SPEC, limit=LIMIT).tobytes() == weights.tobytes()
    with raises(PacketCorrupt, "'=f4'"):
        codec.decode(forged, np.ndarray, SPEC, limit=LIMIT)
