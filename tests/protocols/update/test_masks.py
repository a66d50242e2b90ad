"""Masks on the wire: few bytes, the same mask, and no harm by any bytes."""

import tracemalloc
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.conftest import tiny_spec
from tests.helpers.errors import raises
from tests.protocols.update.test_codec import forged
from tests.wire.mask_vectors import model, small_ones

from fleetune.edge_agent.run.task_reader import preview_task
from fleetune.protocols.errors import PacketCorrupt, PacketError, PacketTooLarge
from fleetune.protocols.method.choice import Budget
from fleetune.protocols.model.spec import FlatArray, MaskArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec, encodings
from fleetune.protocols.update.entropy.booleans import MOST, RUNS_FROM, TOTAL, patterns, runs, surprise
from fleetune.protocols.update.masks.coded_mask import MOST_BOOLEANS, evenly, predicted, read_mask, write_mask
from fleetune.protocols.update.masks.coding_time import coding_time
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.patch_values import PatchWriter
from fleetune.protocols.update.reference_model import ReferenceModel
from fleetune.protocols.update.selection import Entries
from fleetune.protocols.wire.payloads import Assignment

SPEC = tiny_spec()
WIDE = model([(200, 100), (200,), (10, 200)])
KEY = Key(3)


@dataclass(frozen=True)
class Marked:
    patch: Patch
    critical: MaskArray
    table: FlatArray


@dataclass(frozen=True)
class Task:
    marked: Marked
    number: int


@dataclass(frozen=True)
class OfTask:
    number: int


def bound(mask):
    """The entropy of as many equally likely flags, in bytes."""
    share = mask.mean()
    return mask.size * -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / 8


few = settings(max_examples=30)


def drawn(share, size=WIDE.size):
    return Key.of("masks", str(share)).generator().random(size) < share


@given(mask=hnp.arrays(np.bool_, st.integers(1, 90)), data=st.data())
@few
def test_any_mask_comes_back_whatever_the_base(mask, data):
    values = hnp.arrays(np.float32, SPEC.size, elements=st.floats(allow_nan=False, width=32))
    held = hnp.arrays(np.bool_, SPEC.size)
    reference = data.draw(st.none() | st.builds(ReferenceModel, values, held))
    for written in (evenly(mask), predicted(mask, SPEC, reference)):
        assert read_mask(written, mask.size, SPEC, reference).tolist() == mask.tolist()


@given(mask=hnp.arrays(np.bool_, SPEC.num_parameters), data=st.data())
@few
def test_a_mask_of_the_model_comes_back_with_its_base(mask, data):
    values = hnp.arrays(np.float32, SPEC.size, elements=st.sampled_from([0.0, -0.0, 1e-40, -1.0, 3e38]))
    reference = ReferenceModel(data.draw(values), data.draw(hnp.arrays(np.bool_, SPEC.size)))
    assert read_mask(predicted(mask, SPEC, reference), mask.size, SPEC, reference).tolist() == mask.tolist()


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_a_random_mask_is_within_three_percent_of_its_entropy(share):
    mask = drawn(share)
    data = write_mask(mask, WIDE, None)
    assert len(data) <= 1.03 * bound(mask)
    assert read_mask(data, mask.size, WIDE, None).tolist() == mask.tolist()


def test_what_the_base_tells_is_not_sent():
    mask, reference = small_ones(WIDE.size, 100)
    assert len(write_mask(mask, WIDE, reference)) < 0.36 * bound(mask)
    assert len(predicted(mask, WIDE, None)) > 0.75 * bound(mask)  # rows alone


def test_a_threshold_of_the_base_itself_takes_next_to_nothing():
    """As of magnitudes in calm training; rows and columns alone would tell nothing."""
    values = Key(1).generator().normal(0, 1, WIDE.size).astype(np.float32)
    mask = np.abs(values) < 0.5
    assert len(write_mask(mask, WIDE, ReferenceModel.whole(values))) < 0.02 * bound(mask)


def test_entries_that_the_base_lacks_are_told_apart():
    held = drawn(0.5)
    reference = ReferenceModel(np.zeros(WIDE.size, np.float32), held)
    assert len(write_mask(held, WIDE, reference)) < 0.02 * bound(held)


def test_whole_neurons_are_learnt_from_rows_and_columns():
    rows, columns = Key(2).generator().random(200) < 0.4, Key(4).generator().random(100) < 0.4
    mask = np.concatenate([np.outer(rows, columns).ravel(), rows, np.zeros(2000, bool)])
    assert len(predicted(mask, WIDE, None)) < 0.16 * bound(mask)


@pytest.mark.parametrize("mask", [drawn(0.5), np.ones(WIDE.size, bool), drawn(0.3, 200), np.zeros(0, bool)])
def test_where_a_bitmap_is_as_small_it_is_a_bitmap(mask):
    assert write_mask(mask, WIDE, None) is None


@pytest.mark.parametrize(
    ("bps", "flops_per_s", "coded"),
    [
        (1e5, 1e9, True),  # 2.5 kB take 200 ms, 22,200 flags 155
        (2e5, 1e9, False),
        (2e5, 2e9, True),
        (1e8, 2e10, False),
        (0, 1e9, True),  # not known
        (1e8, 0, True),
    ],
)
def test_a_mask_is_coded_where_that_takes_less_than_the_bytes_it_saves(bps, flops_per_s, coded):
    mask = drawn(0.3)
    time = coding_time(flops_per_s / 1e6, 1e6, bps)
    written = write_mask(mask, WIDE, None, time)
    assert (written is not None) == coded
    if written is not None:
        assert written == write_mask(mask, WIDE, None)


@pytest.mark.parametrize("samples_per_s", [5e-324, 1e-300, 1e15])
@pytest.mark.parametrize("bps", [5e-324, 1e-300, 1e15])
def test_whatever_a_device_says_of_its_speed_its_mask_is_written(samples_per_s, bps):
    mask, time = drawn(0.3), coding_time(samples_per_s, 1e6, bps)
    assert write_mask(mask, WIDE, None, time) in (None, write_mask(mask, WIDE, None))


def test_a_bitmap_that_compression_has_shortened_has_less_to_lose():
    mask, time = np.repeat(drawn(0.4, 222), 100) ^ drawn(0.01), coding_time(1e3, 1e6, 3e4)
    assert write_mask(drawn(0.3), WIDE, None, time) is not None
    assert write_mask(mask, WIDE, None) is not None
    assert write_mask(mask, WIDE, None, time) is None


def test_tables_are_those_of_probabilities():
    for level in range(MOST + 1):
        chance = 1 / (1 + 2 ** (level / 4))
        assert surprise(level) == pytest.approx(TOTAL * chance, abs=1.5, rel=0.001)
        if level < RUNS_FROM:
            starts = patterns(level)
            owned = (starts[0b00100100 + 1] - starts[0b00100100]) / starts[-1]
            assert owned == pytest.approx(chance**2 * (1 - chance) ** 6, rel=0.02)
        else:
            table = runs(level)
            in_first_cell = 1 - (1 - chance) ** (1 << table.shift)
            assert table.starts[1] == pytest.approx(TOTAL * in_first_cell, rel=0.002)
            assert all(np.diff([*table.starts, TOTAL]) > 0)


def test_a_payload_carries_its_masks_and_the_values_they_select():
    mask, reference = small_ones(WIDE.size, 100)
    values = reference.values[mask] + np.float32(0.25)
    message = Marked(Patch(Entries(mask), values), ~mask, reference.values)
    writer = PatchWriter(encodings.find("lossless"), WIDE, KEY, reference=reference)
    data = codec.encode(message, WIDE, writer=writer)
    back = codec.decode(data, Marked, WIDE, limit=codec.payload_limit(WIDE), reference=lambda _: reference)
    assert back.patch.selection.bitmap.tolist() == mask.tolist()
    assert back.critical.tolist() == (~mask).tolist()
    assert back.patch.values.tobytes() == values.tobytes()
    raw = PatchWriter(encodings.find("raw"), WIDE, KEY, reference=reference)
    assert codec.encode(message, WIDE, writer=raw) == codec.encode(message, WIDE)


def test_who_asks_for_no_mask_needs_not_what_it_was_written_with():
    """So a device that lost its base still knows what its task says beside that."""
    mask, reference = small_ones(WIDE.size, 100)
    task = Task(Marked(Patch(Entries(mask), reference.values[mask]), ~mask, reference.values), 7)
    writer = PatchWriter(encodings.find("lossless"), WIDE, KEY, reference=reference)
    data = codec.encode(task, WIDE, writer=writer)
    assert codec.decode(data, OfTask, WIDE, limit=codec.payload_limit(WIDE)) == OfTask(7)
    with raises(PacketCorrupt, "mask of form 2"):
        codec.decode(data, Task, WIDE, limit=codec.payload_limit(WIDE))
    assert preview_task(assignment(task, writer), WIDE).budget == Budget(0.5, 0.25, 0)


def assignment(task, writer):
    asked = Assignment("d", 3, 1, False, task, ratio=0.5, local_work=0.25)
    return codec.encode(asked, WIDE, writer=writer)


def test_a_mask_keeps_its_shape():
    mask = drawn(0.05).reshape(20, -1)
    writer = PatchWriter(encodings.find("int8"), WIDE, KEY)
    data = codec.encode(mask, WIDE, writer=writer)
    assert len(data) < bound(mask) * 1.03 + 60
    assert codec.decode(data, MaskArray, WIDE).tolist() == mask.tolist()


def packet(shape, data, spec=WIDE):
    return forged(msgspec.msgpack.encode(["?c", shape, data]), spec)


@pytest.mark.parametrize(
    ("shape", "data", "fault"),
    [
        ([2**39], b"\0", PacketCorrupt),
        ([MOST_BOOLEANS + 1], b"\0", PacketError),
        ([2**20, 2**30], b"\0", PacketCorrupt),
        ([0], b"\0", PacketCorrupt),
        ([100], b"\x60", PacketCorrupt),  # a later form
        ([999], evenly(drawn(0.1, 999)) + b"more" * 4, PacketCorrupt),
        ([999], evenly(drawn(0.5, 999))[:90], PacketError),
        (
            [WIDE.size],
            predicted(drawn(0.1), WIDE, ReferenceModel.nothing(WIDE)),
            PacketCorrupt,
        ),  # here is no base
    ],
)
def test_what_no_writer_writes_is_refused(shape, data, fault):
    with pytest.raises(fault):
        codec.decode(packet(shape, data), MaskArray, WIDE, limit=codec.payload_limit(WIDE))


def test_a_reader_without_a_model_and_one_without_room_refuse():
    good = packet([100], evenly(drawn(0.1, 100)))
    with pytest.raises(PacketCorrupt):
        codec.decode(good, MaskArray, None)
    with pytest.raises(PacketTooLarge):
        codec.decode(good, MaskArray, WIDE, limit=90)


@given(data=st.binary(max_size=60), form=st.sampled_from([b"\x00", b"\x20", b"\x40", b""]))
def test_any_bytes_are_a_mask_or_a_packet_error(data, form):
    for reference in (None, ReferenceModel.nothing(SPEC)):
        with suppress(PacketError):
            assert read_mask(form + data, SPEC.num_parameters, SPEC, reference).shape == (
                SPEC.num_parameters,
            )


def test_reading_takes_the_mask_and_a_bounded_rest():
    big = model([(40, 1000)])
    mask, reference = small_ones(big.size, 1000)
    data = predicted(mask, big, reference)
    tracemalloc.start()
    try:
        read_mask(data, mask.size, big, reference)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= mask.nbytes + 2_000_000
