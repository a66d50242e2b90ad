"""The sketch encoding: a fiftieth of a bit for an entry, right on average, and no harm by any bytes."""

import struct
import tracemalloc

import numpy as np
import pytest

from fleetune.protocols.errors import PacketCorrupt, PacketError, SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.encoding import EncodingSection
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.sketch import Sketch

KEY = Key(7)


def changed(count=20_000):
    draw = KEY.generator()
    base = draw.normal(0, 1, count).astype(np.float32)
    return Known(base), base + draw.standard_t(3, count).astype(np.float32)


def read(known, values, seed, bits=0.02):
    encoded = Sketch(bits).encode(values, known, None, Key(seed))
    assert encoded.residual is None
    return Sketch().decode(encoded.data, values.size, known) - known.base


@pytest.mark.parametrize(("bits", "num_sums"), [(0.0001, 16), (0.02, 512), (0.1, 2048), (1, 16_384)])
def test_it_takes_a_bit_a_sum_and_eight_bytes(bits, num_sums):
    known, values = changed()
    assert num_sums / 8 < len(Sketch(bits).encode(values, known, None, KEY).data) <= num_sums / 8 + 8


def test_over_devices_what_they_agree_on_comes_out():
    known, values = changed(3000)
    change, total, errors = values - known.base, np.zeros(values.size), []
    for seed in range(1, 257):
        total += read(known, values, seed)
        if seed in (4, 16, 64, 256):
            errors.append(np.linalg.norm(total / seed - change) / np.linalg.norm(change))
    assert np.dot(total / 256, change) / np.dot(change, change) == pytest.approx(1, abs=0.05)
    np.testing.assert_allclose(np.array(errors[:-1]) / errors[1:], 2, rtol=0.15)  # a root of how many


def test_the_error_of_one_is_what_its_price_says():
    known, values = changed()
    change = values - known.base
    for bits in (512 / 20_000, 4096 / 20_000):
        error = np.linalg.norm(read(known, values, 1, bits) - change) / np.linalg.norm(change)
        assert error == pytest.approx(Sketch(bits).cost.relative_error, rel=0.15)


def test_what_waited_goes_along():
    known, values = changed(100)
    waited = np.full(100, 3, np.float32)
    with_it = Sketch().encode(values, known, waited, KEY).data
    assert with_it == Sketch().encode(values + waited, known, None, KEY).data


def test_products_first_leave_less_to_sums():
    draw = KEY.generator()
    matrix = draw.normal(0, 1, (100, 2)) @ draw.normal(0, 1, (2, 200)) + draw.normal(0, 0.3, (100, 200))
    known = Known(np.ones(matrix.size, np.float32), row_sizes=(200,))
    values = known.base + matrix.astype(np.float32).ravel()
    sizes, errors = [], []
    for step in (0, 8, 2):
        data = Sketch(step=step).encode(values, known, None, KEY).data
        sizes.append(len(data))
        errors.append(np.linalg.norm(Sketch().decode(data, values.size, known) - values))
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    data = [Sketch(step=4).encode(values, known, None, Key(seed)).data for seed in range(200)]
    mean = np.mean([Sketch().decode(one, values.size, known) for one in data], axis=0)
    assert np.linalg.norm(mean - values) < 0.3 * np.linalg.norm(values - known.base)


def test_nothing_changed_takes_a_byte():
    base = changed(100)[0].base
    data = Sketch().encode(base, Known(base), None, KEY).data
    assert data == b"\1"
    assert Sketch().decode(data, 100, Known(base)).tobytes() == base.tobytes()


def test_without_a_base_and_at_the_ends_of_float32_values_go_as_they_are():
    values, far = changed(50)[1], np.full(50, 3e38, np.float32)
    for known, given in ((Known(), values), (Known(far), -far)):
        data = Sketch().encode(given, known, None, KEY).data
        assert len(data) == 201
        assert Sketch().decode(data, 50, known).tobytes() == given.tobytes()
        assert data == Sketch(step=4).encode(given, known, None, KEY).data
        with pytest.raises(PacketCorrupt, match="201 are due"):
            Sketch().decode(data[:-1], 50, known)


def test_tasks_take_none_and_a_share_that_is_none_is_refused():
    with pytest.raises(ValueError, match="down: sketch is for `up` alone"):
        EncodingSection(down="sketch")
    for step in (-1, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="step"):
            Sketch(step=step)
    for bits in (0, -1, 1.5, float("nan")):
        with pytest.raises(SettingError, match="bits"):
            Sketch(bits)


def forged(log, scale, length):
    return b"\3" + struct.pack("<BHf", log, 7, scale) + bytes(length)


@pytest.mark.parametrize(
    ("data", "about"),
    [
        (b"", "0 bytes begins with b''"),
        (b"\x0b" + bytes(40), "41 bytes begins"),
        (b"\1\1", "1 are due"),
        (forged(10, 1.0, 128), "2\\^10 sums of 400"),
        (forged(200, 1.0, 128), "2\\^200 sums"),
        (forged(5, float("inf"), 4), "scale is inf"),
        (forged(5, -1.0, 4), "scale is -1"),
        (forged(5, 1.0, 5), "of 13 bytes; 12 are due"),
    ],
)
def test_what_no_writer_wrote_is_refused(data, about):
    with pytest.raises(PacketCorrupt, match=about):
        Sketch().decode(data, 400, Known(np.ones(400, np.float32)))


def test_hostile_bytes_are_refused_or_give_so_many_values():
    draw, (known, values) = KEY.generator(), changed(400)
    good, refused = Sketch(0.5, step=3).encode(values, known, None, KEY).data, 0
    for case in range(500):
        data = bytearray(good if case % 2 else draw.bytes(int(draw.integers(0, 40))))
        for _ in range(int(draw.integers(0, 4)) if data else 0):
            data[int(draw.integers(0, len(data)))] = int(draw.integers(0, 256))
        try:
            found = Sketch().decode(bytes(data), 400, known)
        except PacketError:
            refused += 1
            continue
        assert (found.shape, found.dtype) == ((400,), np.float32)
    assert 100 < refused < 500


def test_reading_and_writing_take_little_beside_the_values():
    count = 2_000_000
    known = Known(np.ones(count, np.float32))
    values = 1 + KEY.generator().normal(0, 1, count).astype(np.float32)
    good = Sketch().encode(values, known, None, KEY).data

    def peak_of(act):
        tracemalloc.start()
        act()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    assert peak_of(lambda: Sketch().encode(values, known, None, KEY)) < 4_000_000
    assert peak_of(lambda: Sketch().decode(good, count, known)) < 4 * count + 4_000_000
    most = forged(21, 1.0, 2**18)  # as many sums as there are entries
    assert peak_of(lambda: Sketch().decode(most, count, known)) < 25 * count
