"""The peaks encoding: fewer bits than `sketch` for the same noise, right on average, no harm by any bytes."""

import tracemalloc

import numpy as np
import pytest

from fleetune.protocols.errors import PacketCorrupt, PacketError, SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.encoding import EncodingSection
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.peaks import _HEIGHTS, Peaks
from fleetune.protocols.update.encodings.sketch import Sketch

KEY = Key(7)


def changed(count=20_000):
    draw = KEY.generator()
    base = draw.normal(0, 1, count).astype(np.float32)
    return Known(base), base + draw.standard_t(3, count).astype(np.float32)


def read(known, values, seed, encoding):
    encoded = encoding.encode(values, known, None, Key(seed))
    assert encoded.residual is None
    return encoding.decode(encoded.data, values.size, known) - known.base


def mean_error(known, values, encoding):
    change = values - known.base
    errors = [np.linalg.norm(read(known, values, seed, encoding) - change) for seed in range(8)]
    return np.mean(errors) / np.linalg.norm(change)


@pytest.mark.parametrize(("bits", "num_bytes"), [(0.0001, 16), (0.01, 25), (0.1, 250), (1, 2500)])
def test_it_takes_its_bits_and_five_bytes(bits, num_bytes):
    known, values = changed()
    assert len(Peaks(bits).encode(values, known, None, KEY).data) == num_bytes + 5


def test_over_devices_what_they_agree_on_comes_out():
    known, values = changed(3000)
    change, total, errors = values - known.base, np.zeros(values.size), []
    for seed in range(1, 257):
        total += read(known, values, seed, Peaks(0.1))
        if seed in (4, 16, 64, 256):
            errors.append(np.linalg.norm(total / seed - change) / np.linalg.norm(change))
    assert np.dot(total / 256, change) / np.dot(change, change) == pytest.approx(1, abs=0.05)
    np.testing.assert_allclose(np.array(errors[:-1]) / errors[1:], 2, rtol=0.15)  # a root of how many


@pytest.mark.parametrize("bits", [0.01, 0.02, 0.05])
def test_the_error_of_one_is_what_its_price_says(bits):
    assert mean_error(*changed(), Peaks(bits)) == pytest.approx(Peaks(bits).cost.relative_error, rel=0.1)


def test_signs_alone_take_half_as_many_bytes_again_for_the_same_error():
    known, values = changed(60_000)
    signs, peaks = Sketch(1024 / 60_000), Peaks(640 / 60_000)
    assert mean_error(known, values, peaks) < mean_error(known, values, signs)
    sizes = [len(one.encode(values, known, None, KEY).data) for one in (signs, peaks)]
    assert sizes[0] > 1.5 * sizes[1]


def test_heights_are_those_of_normal_numbers():
    draws = KEY.generator().standard_normal((2000, 1 << 10))
    for log in (0, 4, 7, 10):
        heights = np.abs(draws).reshape(-1, 1 << log).max(1)
        assert heights.mean() == pytest.approx(_HEIGHTS[log], rel=0.01)


def test_what_waited_goes_along():
    known, values = changed(100)
    waited = np.full(100, 3, np.float32)
    with_it = Peaks().encode(values, known, waited, KEY).data
    assert with_it == Peaks().encode(values + waited, known, None, KEY).data


def test_nothing_changed_takes_a_byte():
    base = changed(100)[0].base
    data = Peaks().encode(base, Known(base), None, KEY).data
    assert data == b"\1"
    assert Peaks().decode(data, 100, Known(base)).tobytes() == base.tobytes()


def test_without_a_base_and_at_the_ends_of_float32_values_go_as_they_are():
    values, far = changed(50)[1], np.full(50, 3e38, np.float32)
    for known, given in ((Known(), values), (Known(far), -far)):
        data = Peaks().encode(given, known, None, KEY).data
        assert len(data) == 201
        assert Peaks().decode(data, 50, known).tobytes() == given.tobytes()
        with pytest.raises(PacketCorrupt, match="201 are due"):
            Peaks().decode(data[:-1], 50, known)


def test_tasks_take_none_and_a_share_that_is_none_is_refused():
    with pytest.raises(ValueError, match="down: peaks is for `up` alone"):
        EncodingSection(down="peaks")
    for bits in (0, -1, 1.5, float("nan")):
        with pytest.raises(SettingError, match="bits"):
            Peaks(bits)


def forged(log, told, scale=b"\x80\x3f"):
    return bytes([2 + log, 7, 0]) + scale + told


@pytest.mark.parametrize(
    ("data", "about"),
    [
        (b"", "0 bytes begin with b''"),
        (b"\x0d" + bytes(40), "41 bytes begin"),
        (b"\1\1", "1 are due"),
        (forged(3, b""), "no whole groups"),
        (forged(10, b"\1"), "no whole groups"),
        (forged(10, bytes(11 * 16)), "131072 sums of 400"),
        (forged(3, b"\1", scale=b"\x80\x7f"), "scale is inf"),
        (forged(3, b"\1", scale=b"\x80\xbf"), "scale is -1"),
        (forged(3, b"\1", scale=b"\0\0"), "scale is 0"),
    ],
)
def test_what_no_writer_wrote_is_refused(data, about):
    with pytest.raises(PacketCorrupt, match=about):
        Peaks().decode(data, 400, Known(np.ones(400, np.float32)))
    with pytest.raises(PacketCorrupt, match="does not hold"):
        Peaks().decode(forged(3, b"\1"), 400, Known())


def test_hostile_bytes_are_refused_or_give_so_many_values():
    draw, (known, values) = KEY.generator(), changed(400)
    good, refused = Peaks(0.5).encode(values, known, None, KEY).data, 0
    for case in range(500):
        data = bytearray(good if case % 2 else draw.bytes(int(draw.integers(0, 40))))
        for _ in range(int(draw.integers(0, 4)) if data else 0):
            data[int(draw.integers(0, len(data)))] = int(draw.integers(0, 256))
        try:
            found = Peaks().decode(bytes(data), 400, known)
        except PacketError:
            refused += 1
            continue
        assert (found.shape, found.dtype) == ((400,), np.float32)
    assert 100 < refused < 500


def test_reading_and_writing_take_little_beside_the_values():
    count = 2_000_000
    known = Known(np.ones(count, np.float32))
    values = 1 + KEY.generator().normal(0, 1, count).astype(np.float32)
    good = Peaks().encode(values, known, None, KEY).data

    def peak_of(act):
        tracemalloc.start()
        act()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_of(lambda: Peaks().encode(values, known, None, KEY)) < 3 * count * 4
    assert peak_of(lambda: Peaks().decode(good, count, known)) < 2 * count * 4
    small = forged(10, bytes(11 * 32))  # 256 groups of 1,024
    assert peak_of(lambda: Peaks().decode(small, count, known)) < 2 * count * 4
    most = forged(0, bytes(2**18))  # as many sums as there are entries
    assert peak_of(lambda: Peaks().decode(most, count, known)) < 28 * count
