"""Payloads survive the wire bit for bit; what is damaged or hostile is refused by name."""

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.conftest import tiny_spec

from fleetune.protocols.errors import (
    PacketCorrupt,
    PacketError,
    PacketForeign,
    PacketNotFinite,
    PacketTooLarge,
    PacketTruncated,
    PacketVersion,
)
from fleetune.protocols.method.averaging import SharedModel, Task
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.update import codec
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything, Layers, Neurons, Selection

SPEC = tiny_spec()
LIMIT = codec.payload_limit(SPEC)


@dataclass(frozen=True)
class Mixed:
    values: FlatArray
    table: dict[str, Patch]
    note: str
    loss: float | None


selections = st.one_of(
    st.just(Everything()),
    st.lists(st.sampled_from(["a", "n", "b"]), unique=True).map(lambda names: Layers(tuple(names))),
    st.builds(Neurons, st.floats(0.01, 1.0), st.integers(0, 2**64 - 1)),
    hnp.arrays(bool, SPEC.num_parameters).map(Entries),
)


def patch_over(selection: Selection) -> st.SearchStrategy[Patch]:
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    return hnp.arrays(np.float32, selection.count(SPEC), elements=floats).map(lambda v: Patch(selection, v))


@given(selections.flatmap(patch_over))
def test_a_patch_survives_bit_for_bit(patch):
    data = codec.encode(Task(patch), SPEC)
    back = codec.decode(data, Task, SPEC, limit=LIMIT).patch
    assert type(back.selection) is type(patch.selection)
    assert np.array_equal(back.selection.mask(SPEC), patch.selection.mask(SPEC))
    assert back.values.tobytes() == patch.values.tobytes()
    assert codec.encode(Task(back), SPEC) == data


def test_nested_values_survive(weights):
    patch = Patch.of(weights, Neurons(0.5, 7), SPEC)
    mixed = Mixed(weights, {"b": patch, "a": patch}, "note", None)
    back = codec.decode(codec.encode(mixed, SPEC), Mixed, SPEC)
    assert back.note == "note"
    assert back.loss is None
    assert np.array_equal(back.values, weights)
    assert np.array_equal(back.table["b"].values, patch.values)


@given(st.binary(max_size=400))
def test_noise_is_refused_and_nothing_else_happens(noise):
    with pytest.raises(PacketError):
        codec.decode(noise, Task, SPEC, limit=LIMIT)


@given(st.data())
def test_every_cut_and_every_flipped_byte_is_found(data):
    good = codec.encode(Task(Patch(Everything(), np.ones(SPEC.num_parameters, np.float32))), SPEC)
    where = data.draw(st.integers(0, len(good) - 1))
    with pytest.raises(PacketError):
        codec.decode(good[:where], Task, SPEC, limit=LIMIT)
    flipped = bytearray(good)
    flipped[where] ^= data.draw(st.integers(1, 255))
    if where not in range(5, 8):  # the three zero bytes of the header carry nothing
        with pytest.raises(PacketError):
            codec.decode(bytes(flipped), Task, SPEC, limit=LIMIT)


def forged(body: bytes, spec=SPEC, num_bytes=None) -> bytes:
    packed = zstandard.ZstdCompressor().compress(body)
    size = len(body) if num_bytes is None else num_bytes
    return (
        codec._HEADER.pack(b"FLTN", codec.VERSION, bytes.fromhex(spec.hash), size, codec._checksum(packed))
        + packed
    )


def test_each_fault_has_its_name(weights):
    good = codec.encode(SharedModel(weights), SPEC)
    for fault, data in {
        PacketTruncated: good[:-1],
        PacketVersion: good[:4] + bytes([codec.VERSION + 2]) + good[5:],
        PacketForeign: codec.encode(SharedModel(weights), tiny_spec(hidden=7)),
        PacketTooLarge: forged(b"\0" * (LIMIT + 1)),
        PacketCorrupt: forged(msgspec.msgpack.encode({"weights": 3})),
    }.items():
        with pytest.raises(fault):
            codec.decode(data, SharedModel, SPEC, limit=LIMIT)
    with pytest.raises(PacketNotFinite):
        codec.decode(codec.encode(SharedModel(weights * np.float32(np.nan)), SPEC), SharedModel, SPEC)


def test_an_array_that_is_only_named_is_fetched_from_its_keeper_and_refused_from_the_wire(weights):
    keeper = {}

    def keep(array):
        keeper[b"name"] = array
        return b"name"

    data = codec.encode(SharedModel(weights), SPEC, keep=keep)
    assert codec.decode(data, SharedModel, SPEC, stored_array=keeper.__getitem__).weights is weights
    with pytest.raises(PacketCorrupt, match="array"):
        codec.decode(data, SharedModel, SPEC, limit=LIMIT)


def test_a_small_packet_cannot_claim_a_large_allocation():
    bomb = forged(b"\0" * 10_000, num_bytes=2**40)
    with pytest.raises(PacketTooLarge):
        codec.decode(bomb, SharedModel, SPEC, limit=LIMIT)
    with pytest.raises(PacketCorrupt):
        codec.decode(forged(b"\0" * 100_000, num_bytes=10), SharedModel, SPEC, limit=LIMIT)
    claims = msgspec.msgpack.encode({"weights": ["f4", [2**39], b"1234"]})
    with pytest.raises(PacketCorrupt, match="shape"):
        codec.decode(forged(claims), SharedModel, SPEC, limit=LIMIT)


@pytest.mark.parametrize(
    "patch",
    [
        Patch(Everything(), np.ones(3, np.float32)),
        Patch(Layers(("nowhere",)), np.ones(0, np.float32)),
        Patch(Neurons(0.0, 1), np.ones(0, np.float32)),
        Patch(Neurons(float("nan"), 1), np.ones(0, np.float32)),
        Patch(Entries(np.ones(4, bool)), np.ones(4, np.float32)),
    ],
    ids=["too few values", "unknown layer", "ratio 0", "ratio nan", "bitmap of another model"],
)
def test_a_patch_that_does_not_fit_the_model_is_refused(patch):
    with pytest.raises(PacketCorrupt):
        codec.decode(codec.encode(Task(patch), SPEC), Task, SPEC, limit=LIMIT)
