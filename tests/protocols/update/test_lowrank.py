"""The lowrank encoding: outer products for few bytes, in steps; and no harm by any bytes."""

import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from tests.helpers.errors import raises

from fleetune.protocols.errors import PacketCorrupt, PacketError, PacketNotFinite, SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.lowrank import LowRank
from fleetune.protocols.update.encodings.lowrank_choice import cheapest
from fleetune.protocols.update.encodings.lowrank_grids import tensors_of
from fleetune.protocols.update.encodings.sparse import Sparse
from fleetune.protocols.update.entropy.octaves import magnitude, nearest
from fleetune.protocols.update.entropy.range_coder import (
    RangeDecoder,
    RangeEncoder,
    symbols_in_order,
    write_symbols,
)
from fleetune.protocols.update.entropy.small_integers import LARGEST, TURN, IntegerReader, IntegerWriter
from fleetune.protocols.update.products import products_of, sum_of

KEY = Key(5)


def drawn(seed: int) -> np.random.Generator:
    return Key(seed).generator()


def few_products(rows=60, columns=200, rank=3, noise=0.0):
    """A matrix of so many outer products of about equal size, and noise, of unit root mean square."""
    draw = drawn(1)
    products = draw.normal(0, 1, (rows, rank)) @ draw.normal(0, 1, (rank, columns)) / np.sqrt(rank)
    return (products + draw.normal(0, noise, (rows, columns))).astype(np.float32)


def error(encoded, changes):
    return np.linalg.norm(encoded.residual) / np.linalg.norm(changes)


def of_matrix(matrix):
    return Known(np.zeros(matrix.size, np.float32), row_sizes=(matrix.shape[1],))


@pytest.mark.parametrize("scale", [0.1, 0.7, 3.0, 6.0])
def test_integers_take_their_entropy_and_come_back(scale):
    integers = np.rint(drawn(2).laplace(0, scale, 20_000)).astype(np.int64)
    integers[:3] = -LARGEST, LARGEST, 15
    expected = np.full(integers.size, int(4 * np.log2(2 * scale**2)))
    out = RangeEncoder()
    IntegerWriter(out).write(integers, expected)
    data = out.finish()
    share = np.unique(integers, return_counts=True)[1] / integers.size
    assert len(data) <= 1.05 * -(share * np.log2(share)).sum() * integers.size / 8 + 20
    source = RangeDecoder(data)
    assert np.array_equal(IntegerReader(source).read(expected), integers)
    source.finish()


def test_integers_of_unlike_sizes_take_less_where_it_is_known_which():
    scale = np.repeat([0.1, 4.0], 2000)
    integers = np.rint(drawn(3).laplace(0, scale)).astype(np.int64)
    sizes = []
    for expected in (4 * np.log2(2 * scale**2), np.full(4000, 8.0)):
        out = RangeEncoder()
        IntegerWriter(out).write(integers, expected.astype(np.int64))
        sizes.append(len(out.finish()))
    assert sizes[0] < 0.85 * sizes[1]


def test_batches_that_are_written_at_once_are_the_bytes_of_one_after_the_other():
    draw = drawn(4)
    sizes = [7, 0, 900, 64, 1]
    integers = np.rint(draw.laplace(0, np.repeat([0.1, 1, 4, 30, 9000], sizes))).astype(np.int16)
    expected = np.rint(draw.normal(4, 12, integers.size)).astype(np.int64)
    together, apart = RangeEncoder(), RangeEncoder()
    heads = [(3, 1, 15), (0, 2, 4), None, (9, 1, 10), None]
    parts = IntegerWriter(together).symbols(integers, expected, sizes, [1, 3, 5, 7, 9])
    there = [(2 * number * TURN, *head) for number, head in enumerate(heads) if head is not None]
    write_symbols(together, [symbols_in_order(there), *parts])
    writer, ends = IntegerWriter(apart), np.cumsum(sizes)
    for end, size, head in zip(ends, sizes, heads, strict=True):
        if head is not None:
            apart.write(*head)
        writer.write(integers[end - size : end], expected[end - size : end])
    data = together.finish()
    assert data == apart.finish()
    source = RangeDecoder(data)
    reader = IntegerReader(source)
    for end, size, head in zip(ends, sizes, heads, strict=True):
        if head is not None:
            assert source.peek(head[2]) >= head[0]
            source.take(*head[:2])
        assert np.array_equal(reader.read(expected[end - size : end]), integers[end - size : end])


def test_what_is_three_products_goes_as_three():
    matrix = few_products()
    found = products_of(matrix / np.float32(0.1), None, most=20)
    assert len(found) == 3
    whole = np.concatenate([part for _, part in sum_of(found, *matrix.shape)]).reshape(matrix.shape)
    assert np.abs(whole - matrix / 0.1).max() < 3


@pytest.mark.parametrize("tall", [False, True])
def test_products_take_fewer_bytes_than_entries_for_less_error(tall):
    matrix = few_products(noise=0.05)
    matrix = np.ascontiguousarray(matrix.T) if tall else matrix
    values, known = matrix.ravel(), of_matrix(matrix)
    encoded = LowRank(2.0).encode(values, known, None, KEY)
    thin = Sparse(density=0.1).encode(values, known, None, KEY)
    assert len(encoded.data) < len(thin.data)
    assert error(encoded, values) < 0.4 < error(thin, values)
    blind = LowRank(2.0).encode(values, Known(known.reference), None, KEY)
    assert len(blind.data) > len(encoded.data), "rows are not known to this one"
    assert error(blind, values) > error(encoded, values)


def test_finer_steps_take_more_and_lose_less():
    values, known = few_products(noise=0.3).ravel(), of_matrix(few_products())
    found = [LowRank(step).encode(values, known, None, KEY) for step in (8.0, 4.0, 2.0, 1.0, 0.5)]
    sizes, errors = [len(one.data) for one in found], [error(one, values) for one in found]
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.25


def test_a_round_of_training_goes_as_products():
    """Of a linear layer, by the algebra: each sample adds an outer product."""
    draw = drawn(6)
    features, deltas = draw.gamma(0.5, 1, (8, 256)), draw.normal(0, 1, (8, 64))
    matrix = (deltas.T @ features).astype(np.float32)
    data = LowRank(3.0).encode(matrix.ravel(), of_matrix(matrix), None, KEY)
    assert len(data.data) < matrix.size / 20
    assert error(data, matrix) < 0.5


def test_what_is_left_out_arrives_over_the_rounds():
    """And does not grow without end, also where few products tell little and steps are coarse."""
    change, known = few_products(30, 40, noise=1.0).ravel(), of_matrix(few_products(30, 40))
    arrived, residual = np.zeros(change.size), None
    for _ in range(30):
        encoded = LowRank(4.0).encode(change, known, residual, KEY)
        residual = encoded.residual
        arrived += LowRank().decode(encoded.data, change.size, known)
    np.testing.assert_allclose(arrived + residual, 30 * change, atol=1e-2)
    assert np.linalg.norm(residual) < 10 * np.linalg.norm(change)


@pytest.mark.parametrize(
    ("places", "row_size", "shape", "whole"),
    [
        (None, 30, (4, 30), True),
        (None, 1, (0, 0), True),
        (None, 0, (0, 0), True),
        (None, 7, (0, 0), True),
        (np.flatnonzero(np.arange(120) % 30 < 10), 30, (4, 10), True),
        (np.flatnonzero((np.arange(120) // 30) % 2), 30, (2, 30), True),
        (np.flatnonzero(np.arange(120) % 7 == 0), 30, (4, 18), False),
        (np.array([1, 2, 33, 34]), 30, (2, 4), False),
        (np.array([1, 2, 31, 32, 61, 62]), 30, (3, 2), True),
        (np.array([1, 2, 31, 62]), 30, (3, 2), False),
    ],
)
def test_a_part_of_a_matrix_is_one_of_the_rows_and_columns_that_it_has(places, row_size, shape, whole):
    count = 120 if places is None else places.size
    known = Known(None, row_sizes=(row_size,), places=None if places is None else places.astype(np.int32))
    (tensor,) = tensors_of(known, count)
    assert (tensor.rows, tensor.columns) == shape
    assert (tensor.scattered is None) == whole
    bundles = list(tensor.bundles())
    assert [one.stop for one in bundles[:-1]] == [one.start for one in bundles[1:]]
    assert (bundles[0].start, bundles[-1].stop) == (0, count)
    if places is not None:
        rows, columns = (np.unique(one, return_inverse=True)[1] for one in np.divmod(places, row_size))
        everything = slice(0, count)
        assert np.array_equal(tensor.columns_of(everything), columns)
        assert np.array_equal(tensor.cells_of(everything), rows * shape[1] + columns)


def scattered(matrix, share, seed=12):
    """Entries of a matrix, each there with this chance, and what both sides know of them."""
    there = np.flatnonzero(drawn(seed).random(matrix.size) < share).astype(np.int32)
    zeros = np.zeros(there.size, np.float32)
    return matrix.ravel()[there], Known(zeros, row_sizes=(matrix.shape[1],), places=there)


@pytest.mark.parametrize("tall", [False, True])
def test_scattered_entries_of_few_products_go_as_these(tall):
    matrix = few_products(noise=0.1)
    matrix = np.ascontiguousarray(matrix.T) if tall else matrix
    values, known = scattered(matrix, 0.5)
    encoded = LowRank(1.0).encode(values, known, None, KEY)
    assert len(encoded.data) < 0.02 * values.nbytes
    assert error(encoded, values) < 0.2
    back = LowRank().decode(encoded.data, values.size, known)
    np.testing.assert_allclose(back + encoded.residual, values, atol=1e-6)
    blind = LowRank(1.0).encode(values, Known(known.reference), None, KEY)
    assert len(blind.data) > 3 * len(encoded.data)
    thin = Sparse(density=0.5, levels=16, span="all").encode(values, known, None, KEY)
    assert len(thin.data) > 3 * len(encoded.data)


def test_what_products_leave_may_go_as_entries():
    """Where a few entries change by themselves, neither of both alone tells it for as few bytes."""
    matrix = few_products(noise=0.05)
    matrix.ravel()[drawn(13).choice(matrix.size, 60, replace=False)] += 5
    values, known = scattered(matrix, 0.7)
    encoded = LowRank(1.0).encode(values, known, None, KEY)
    (tensor,) = tensors_of(known, values.size)
    products, entries = cheapest(tensor, values)
    assert 3 <= len(products) <= 6
    assert 30 <= np.count_nonzero(entries) < 200
    assert error(encoded, values) < 0.25
    back = LowRank().decode(encoded.data, values.size, known)
    np.testing.assert_allclose(back + encoded.residual, values, atol=1e-6)


def test_a_bundle_of_one_entry_in_wide_rows_and_rows_of_one_entry():
    for places, row_size in ((np.arange(0, 40_000, 999), 4000), (np.arange(0, 3000, 31), 30)):
        values = drawn(14).normal(0, 1, places.size).astype(np.float32)
        known = Known(
            np.zeros(places.size, np.float32), row_sizes=(row_size,), places=places.astype(np.int32)
        )
        encoded = LowRank(0.1).encode(values, known, None, KEY)
        back = LowRank().decode(encoded.data, values.size, known)
        np.testing.assert_allclose(back + encoded.residual, values, atol=1e-6)
        assert error(encoded, values) < 0.1


@pytest.mark.parametrize("step", [0, -1, float("nan"), float("inf")])
def test_a_step_that_is_none_is_refused(step):
    with pytest.raises(SettingError, match="step"):
        LowRank(step)


def test_nothing_changed_takes_a_byte_at_most():
    reference = drawn(8).normal(0, 1, 100).astype(np.float32)
    encoded = LowRank().encode(reference, Known(reference), None, KEY)
    assert encoded.data == b"\x20"
    assert LowRank().decode(encoded.data, 100, Known(reference)).tobytes() == reference.tobytes()
    assert not encoded.residual.any()
    assert LowRank().encode(np.zeros(100, np.float32), Known(), None, KEY).data == b""


@pytest.mark.parametrize("size", [1e-45, 3e-42, 1.2e-38, 1e-20, 1.0, 1e20, 3e38])
def test_any_size_of_a_change_is_said(size):
    assert magnitude(nearest(size)) == pytest.approx(size, rel=0.045, abs=1e-45)
    changes = np.full(300, size, np.float32)
    back = LowRank(1.0).decode(
        (encoded := LowRank(1.0).encode(changes, Known(), None, KEY)).data, 300, Known()
    )
    np.testing.assert_allclose(back, changes, rtol=0.045, atol=1e-45)
    assert np.isfinite(encoded.residual).all()


def test_steps_that_lead_beyond_float32_all_wait():
    most = np.float32(3.4e38)
    reference, values = (
        np.array([most, -most, 0, 1], np.float32),
        np.array([-most, most, most / 2, 0], np.float32),
    )
    encoded = LowRank(1.0).encode(values, Known(reference), values, KEY)
    back = LowRank().decode(encoded.data, 4, Known(reference))
    assert np.isfinite(back).all()
    assert np.isfinite(encoded.residual).all()
    data = LowRank(1.0).encode(np.full(4, most / 2), Known(np.zeros(4, np.float32)), None, KEY).data
    with pytest.raises(PacketNotFinite):
        LowRank().decode(data, 4, Known(np.full(4, most)))


@pytest.mark.parametrize("whole", [True, False])
def test_hostile_bytes_give_finite_values_or_are_refused(whole):
    rng, rows = drawn(11), 12 if whole else 24
    places = np.arange(300) if whole else np.sort(rng.choice(600, 300, replace=False))
    matrix = few_products(rows, 25, noise=0.3)
    reference = rng.normal(0, 1, 320).astype(np.float32)
    in_tensor = None if whole else np.concatenate([places, np.arange(20)]).astype(np.int32)
    known = Known(reference, np.repeat([0, 1], [300, 20]).astype(np.int16), (25, 1), in_tensor)
    values = reference + np.concatenate([matrix.ravel()[places], np.ones(20, np.float32)])
    good = LowRank(1.0).encode(values, known, None, KEY).data
    refused = 0
    for case in range(500):
        data = bytearray(good if case % 3 else rng.bytes(int(rng.integers(0, 80))))
        for _ in range(int(rng.integers(0, 4))):
            if data:
                data[int(rng.integers(0, len(data)))] = int(rng.integers(0, 256))
        data = data[: int(rng.integers(0, len(data) + 1))] if case % 5 == 0 else data
        try:
            found = LowRank().decode(bytes(data), 320, known)
        except PacketError:
            refused += 1
            continue
        assert found.shape == (320,)
        assert np.isfinite(found).all()
    assert 150 < refused < 500
    with raises(PacketCorrupt, "bytes after the end"):
        LowRank().decode(good + b"\1" * 12, 320, known)


def test_more_products_than_pay_and_empty_ones_are_refused():
    def forged(number, *factors):
        out = RangeEncoder()
        for symbol, total in ((0, 8), (900, 2216), (2, 4)):
            out.write(symbol, 1, total)
        out.write_number(number - 1, 9)
        out.write(3, 1, 15)
        writer = IntegerWriter(out)
        for factor in factors:
            writer.write(np.array(factor), np.full(len(factor), 24 - 12))
        return out.finish()

    def read(data, rows, columns):
        return LowRank().decode(data, rows * columns, Known(None, row_sizes=(columns,)))

    assert read(forged(1, [1] * 8, [1] * 8), 8, 8).any()
    for data, rows, columns, about in (
        (forged(4, [1] * 8, [1] * 8), 8, 8, "at most 3"),
        (forged(1, [1] * 8, [1] * 8), 4, 16, "at most 0"),
        (forged(1, [0] * 8, [1] * 8), 8, 8, "zeros"),
        (forged(1, [1] * 8, [0] * 8), 8, 8, "zeros"),
    ):
        with pytest.raises(PacketCorrupt, match=about):
            read(data, rows, columns)


def test_reading_few_bytes_takes_little_beside_the_values():
    count = 2_000_000
    known = Known(np.ones(count, np.float32), np.zeros(count, np.int16), (1000,))
    matrix = few_products(2000, 1000, rank=2)
    good = LowRank(4.0).encode(1 + matrix.ravel(), known, None, KEY).data
    many = np.zeros((2000, 1000), np.float32)
    many[range(255), range(255)] = 1 + np.arange(255) / 255  # as many products, of next to nothing each
    thin = LowRank(2.0).encode(1 + many.ravel(), known, None, KEY).data
    half, of_half = scattered(matrix, 0.5)
    few = LowRank(4.0).encode(half, of_half, None, KEY).data
    of_all = [(data, count, known) for data in (b"\xff" * 1000, b"\0" * 1000 + b"\1", good, thin)]
    for data, size, of_them in [*of_all, (few, half.size, of_half), (b"\x55" * 1000, half.size, of_half)]:
        tracemalloc.start()
        with suppress(PacketError):
            LowRank().decode(data, size, of_them)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * size + 3_000_000
