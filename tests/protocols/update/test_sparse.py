"""The sparse encoding: few bytes, exact places, signs and residual, and no harm by any bytes."""

import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
from tests.helpers.errors import raises

from fleetune.protocols.errors import PacketCorrupt, PacketError, PacketNotFinite, SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.sparse import Sparse
from fleetune.protocols.update.entropy.range_coder import RangeDecoder, RangeEncoder

KEY = Key(5)


def drawn(seed: int) -> np.random.Generator:
    return Key(seed).generator()


def entropy_bits(share):
    return -(share * np.log2(share) + (1 - share) * np.log2(1 - share)).sum()


def sent(changes, known=None, density=0.02):
    """Bytes and what they decode to, of changes to a base of zeros."""
    known = known or Known(np.zeros(changes.size, np.float32))
    encoded = Sparse(density=density).encode(changes, known, None, KEY)
    return encoded, Sparse().decode(encoded.data, changes.size, known)


def test_symbols_take_what_their_probabilities_allow_and_come_back():
    rng = drawn(1)
    counts = np.array([1, 10, 300, 5_000, 60_225])
    symbols = rng.choice(5, 20_000, p=counts / counts.sum())
    starts, total = np.cumsum(counts) - counts, int(counts.sum())
    out = RangeEncoder()
    for symbol in symbols.tolist():
        out.write(int(starts[symbol]), int(counts[symbol]), total)
        out.write(symbol, 1, 8)
    data = out.finish()
    ideal = -np.log2(counts[symbols] / total).sum() + 3 * symbols.size
    assert len(data) <= ideal / 8 + 2

    back = RangeDecoder(data)
    for symbol in symbols.tolist():
        assert np.searchsorted(starts, back.peek(total), side="right") - 1 == symbol
        back.take(int(starts[symbol]), int(counts[symbol]))
        assert back.read_bits(3) == symbol
    back.finish()


@pytest.mark.parametrize("ending", [[0] * 40, [65_535] * 40, [65_535, 0] * 20, [0] * 39 + [1], []])
def test_carries_and_bare_ends_are_read_back(ending):
    for length in range(9):
        numbers = [65_535] * length + ending
        out = RangeEncoder()
        for number in numbers:
            out.write(number, 1, 65_536)
        back = RangeDecoder(out.finish())
        for number in numbers:
            assert back.peek(65_536) == number
            back.take(number, 1)
        back.finish()


@pytest.mark.parametrize("density", [0.005, 0.02, 0.2])
def test_evenly_scattered_entries_take_their_entropy(density):
    """Nothing is to be predicted: gaps, counts and signs may cost what chance costs."""
    rng, count = drawn(2), 100_000
    hits = rng.random(count) < density
    changes = (hits * rng.choice([-1, 1], count)).astype(np.float32)
    known = Known(np.zeros(count, np.float32), np.zeros(count, np.int16), (250,))
    encoded, back = sent(changes, known, density=1.0)
    assert np.array_equal(back, changes)
    ideal = (entropy_bits(np.full(count, hits.mean())) + hits.sum()) / 8
    assert len(encoded.data) <= 1.03 * ideal


@pytest.mark.parametrize("density", [0.01, 0.02, 0.1])
def test_busy_rows_and_columns_take_less_and_nearly_what_they_could(density):
    rng, rows, columns = drawn(3), 400, 250
    share = np.outer(rng.gamma(0.5, 1, rows), rng.gamma(0.5, 1, columns))
    share = np.minimum(share * density / share.mean(), 0.8).ravel()
    hits = rng.random(share.size) < share
    changes = (hits * rng.choice([-1, 1], share.size)).astype(np.float32)
    whole = Known(np.zeros(share.size, np.float32), np.zeros(share.size, np.int16), (columns,))
    data = sent(changes, whole, density=1.0)[0].data
    evenly = (entropy_bits(np.full(share.size, hits.mean())) + hits.sum()) / 8
    told = (entropy_bits(share[(share > 0) & (share < 1)]) + hits.sum()) / 8  # who knows every probability
    assert len(data) < 0.92 * evenly
    assert len(data) < told + 0.5 * (evenly - told)
    half = np.flatnonzero(rng.random(share.size) < 0.5)
    part = Known(
        np.zeros(half.size, np.float32), np.zeros(half.size, np.int16), (columns,), half.astype("i4")
    )
    blind = Known(part.reference, part.tensors)
    assert len(sent(changes[half], part, 1.0)[0].data) < 0.9 * len(sent(changes[half], blind, 1.0)[0].data)


def test_signs_that_go_by_rows_take_less_than_a_bit():
    rng = drawn(4)
    hits = rng.random((300, 200)) < 0.05
    signs = np.where(rng.random((300, 1)) < 0.5, -1, 1) * np.where(rng.random((300, 200)) < 0.1, -1, 1)
    known = Known(np.zeros(60_000, np.float32), np.zeros(60_000, np.int16), (200,))
    alike = len(sent((hits * signs).astype(np.float32).ravel(), known, 1.0)[0].data)
    mixed = rng.choice([-1, 1], hits.shape)
    apart = len(sent((hits * mixed).astype(np.float32).ravel(), known, 1.0)[0].data)
    assert apart - alike > 0.35 * hits.sum() / 8  # H(0.1) is 0.47


@pytest.mark.parametrize("levels", [1, 3, 16])
def test_the_largest_entries_go_in_levels_and_the_rest_is_left(levels):
    rng, count = drawn(5), 70_000  # more than two blocks
    reference, values = rng.normal(0, 1, (2, count)).astype(np.float32)
    tensors = (np.arange(count) >= 66_000).astype(np.int16)
    values[tensors == 1] += reference[tensors == 1] * np.float32(3)
    residual = rng.normal(0, 0.3, count).astype(np.float32)
    known = Known(reference, tensors, (1000, 200))
    encoded = Sparse(density=0.03, levels=levels).encode(values, known, residual, KEY)
    back = Sparse().decode(encoded.data, count, known)

    change = values + residual - reference
    moved = back != reference
    assert np.count_nonzero(moved) == 2100
    sizes = np.abs(change[moved])
    assert sizes.min() >= np.abs(change[~moved]).max()
    assert np.array_equal(np.sign(back - reference)[moved], np.sign(change)[moved])
    width = 2 * (sizes.mean(dtype=np.float64) - sizes.min())
    level = np.minimum((sizes - sizes.min()) / width, levels - 1).astype(int)
    means = np.bincount(level, sizes) / np.maximum(1, np.bincount(level))
    np.testing.assert_allclose(np.abs(back - reference)[moved], means[level], rtol=2 ** (1 / 16) - 1 + 1e-3)
    assert encoded.residual.tobytes() == (values + residual - back).tobytes()


def test_levels_leave_less():
    changes = drawn(13).laplace(0, 1, 20_000).astype(np.float32)
    left, taken = [], []
    for levels in (1, 2, 8):
        encoded = Sparse(density=0.05, levels=levels).encode(changes, Known(), None, KEY)
        left.append(np.linalg.norm(encoded.residual))
        taken.append(len(encoded.data))
    assert left[0] > left[1] > left[2]
    assert taken[0] < taken[1] < taken[2] < 1.2 * taken[0]


def test_levels_up_to_the_largest_lose_less_of_a_heavy_tail():
    draw = drawn(14)
    changes = (draw.laplace(0, 1, 20_000) * draw.gamma(0.4, 1, 20_000)).astype(np.float32)
    encoded = {
        span: Sparse(density=0.3, levels=16, span=span).encode(changes, Known(), None, KEY)
        for span in ("mean", "all")
    }
    left = {span: np.linalg.norm(one.residual) / np.linalg.norm(changes) for span, one in encoded.items()}
    assert left["all"] < 0.5 * left["mean"]
    assert len(encoded["all"].data) < 1.5 * len(encoded["mean"].data)
    back = Sparse().decode(encoded["all"].data, changes.size, Known())
    sizes, sent_sizes = np.abs(changes[back != 0]).astype(np.float64), np.abs(back[back != 0])
    edges = (np.sqrt(sizes) - np.sqrt(sizes.min())) / (np.sqrt(sizes.max()) - np.sqrt(sizes.min()))
    level = np.minimum(16 * edges, 15).astype(int)
    means = np.bincount(level, sizes) / np.maximum(1, np.bincount(level))
    np.testing.assert_allclose(sent_sizes, means[level], rtol=2 ** (1 / 16) - 1 + 1e-3)


@pytest.mark.parametrize("levels", [0, 17, -1])
def test_more_levels_than_there_are_are_refused(levels):
    with pytest.raises(SettingError, match="levels"):
        Sparse(levels=levels)


def test_what_is_left_out_arrives_over_the_rounds():
    rng, count = drawn(6), 5_000
    change = rng.normal(0, 1, count).astype(np.float32)
    known, arrived, residual = Known(np.zeros(count, np.float32)), np.zeros(count), None
    for _ in range(30):
        encoded = Sparse(density=0.1).encode(change, known, residual, KEY)
        residual = encoded.residual
        arrived += Sparse().decode(encoded.data, count, known)
    np.testing.assert_allclose(arrived + residual, 30 * change, atol=1e-2)
    assert np.abs(residual).max() < 30


@pytest.mark.parametrize(
    ("count", "density", "moved"),
    [(1, 0.02, 1), (49, 0.02, 1), (51, 0.02, 2), (1000, 0.5, 500), (1000, 1.0, 1000), (1000, 1e-9, 1)],
)
def test_density_is_the_share_that_goes(count, density, moved):
    changes = drawn(7).normal(0, 1, count).astype(np.float32)
    assert np.count_nonzero(sent(changes, density=density)[1]) == moved


def test_of_equal_entries_the_first_go():
    back = sent(np.full(1000, -2, np.float32), density=0.1)[1]
    assert np.flatnonzero(back).tolist() == list(range(100))


@pytest.mark.parametrize("density", [0, -0.1, 1.01, float("nan")])
def test_a_density_that_is_no_share_is_refused(density):
    with pytest.raises(SettingError, match="density"):
        Sparse(density=density)


def test_nothing_changed_takes_a_byte_at_most():
    reference = drawn(8).normal(0, 1, 100).astype(np.float32)
    encoded = Sparse().encode(reference, Known(reference), None, KEY)
    assert encoded.data == b"\x20"
    assert Sparse().decode(encoded.data, 100, Known(reference)).tobytes() == reference.tobytes()
    assert not encoded.residual.any()
    assert Sparse().encode(np.zeros(100, np.float32), Known(), None, KEY).data == b""
    assert not Sparse().decode(b"", 100, Known()).any()
    assert Sparse().encode(reference[:0], Known(), None, KEY).data == b""
    assert Sparse().decode(b"", 0, Known()).size == 0


@pytest.mark.parametrize("size", [1e-45, 3e-42, 1.2e-38, 1e-20, 1.0, 1e20, 3.2e38])
def test_any_size_of_a_change_goes_to_an_eighth_of_an_octave(size):
    changes = np.full(10, size, np.float32) * drawn(9).choice(np.array([-1, 1], "f4"), 10)
    back = sent(changes, density=1.0)[1]
    np.testing.assert_allclose(back, changes, rtol=0.045, atol=1e-45)


def test_entries_whose_change_would_overflow_stay_behind():
    most = np.float32(3.4e38)
    reference = np.array([most, -most, 0, 1], np.float32)
    values, known = np.array([-most, most, most / 2, 0], np.float32), Known(reference)
    encoded = Sparse(density=1.0).encode(values, known, values, KEY)
    back = Sparse().decode(encoded.data, 4, known)
    assert np.isfinite(back).all()
    assert np.isfinite(encoded.residual).all()
    with pytest.raises(PacketNotFinite):
        Sparse().decode(sent(np.full(4, most / 2), density=1.0)[0].data, 4, Known(np.full(4, most)))


def test_the_bytes_of_a_draw_are_these():
    """Bytes of every machine and of every later version; docs/wire.md says how they come about."""
    rng = drawn(10)
    changes = (rng.normal(0, 1, 3000) * np.repeat(rng.gamma(0.3, 1, 60), 50)).astype(np.float32)
    known = Known(np.zeros(3000, np.float32), np.repeat([0, 1], [2000, 1000]).astype(np.int16), (50, 50))
    assert sent(changes, known)[0].data.hex() == DRAW


DRAW = (
    "23172b4bb1b61db72c73bfbd76d3cba52afa910cfdb7b1fffd10fb2db16493489c34932189b3394e5ff00c367b3912e7ea9570"
)


def test_hostile_bytes_give_finite_values_or_are_refused():
    rng, count = drawn(11), 300
    reference = rng.normal(0, 1, count).astype(np.float32)
    known = Known(reference, (np.arange(count) // 100).astype(np.int16), (20, 7, 1))
    good = Sparse().encode(reference + rng.normal(0, 1, count).astype(np.float32), known, None, KEY).data
    refused = 0
    for case in range(500):
        data = bytearray(good if case % 3 else rng.bytes(int(rng.integers(0, 80))))
        for _ in range(int(rng.integers(0, 4))):
            if data:
                data[int(rng.integers(0, len(data)))] = int(rng.integers(0, 256))
        data = data[: int(rng.integers(0, len(data) + 1))] if case % 5 == 0 else data
        try:
            values = Sparse().decode(bytes(data), count, known)
        except PacketError:
            refused += 1
            continue
        assert values.shape == (count,)
        assert np.isfinite(values).all()
    assert 150 < refused < 500
    with raises(PacketCorrupt, "bytes after the end"):
        Sparse().decode(good + b"\1" * 12, count, known)


def test_reading_few_bytes_takes_little_beside_the_values():
    count = 2_000_000
    known = Known(np.ones(count, np.float32), np.zeros(count, np.int16), (1000,))
    good = sent(np.ones(1000, np.float32), density=1.0)[0].data
    for data in (b"\xff" * 1000, b"\0" * 1000 + b"\1", good):
        tracemalloc.start()
        with suppress(PacketError):
            Sparse().decode(data, count, known)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * count + 3_000_000


def test_the_bytes_of_a_change_are_the_same_at_every_go():
    changes = drawn(12).normal(0, 1, 40_000).astype(np.float32)
    assert sent(changes)[0].data == sent(changes.copy())[0].data
