"""What holds for each encoding that is right on average alone: nothing waits, no bytes do harm."""

import tracemalloc

import numpy as np
import pytest
from tests.helpers.errors import raises

from fleetune.protocols.errors import PacketCorrupt, PacketError, SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.encoding import EncodingSection
from fleetune.protocols.update import encodings
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.peaks import Peaks
from fleetune.protocols.update.encodings.sketch import Sketch

KEY = Key(7)
ON_AVERAGE = [Sketch, Peaks]


def changed(count=20_000):
    draw = KEY.generator()
    reference = draw.normal(0, 1, count).astype(np.float32)
    return Known(reference), reference + draw.standard_t(3, count).astype(np.float32)


def read(known, values, seed, encoding):
    encoded = encoding.encode(values, known, None, Key(seed))
    assert encoded.residual is None
    return encoding.decode(encoded.data, values.size, known) - known.reference


def mean_error(known, values, encoding):
    change = values - known.reference
    errors = [np.linalg.norm(read(known, values, seed, encoding) - change) for seed in range(8)]
    return np.mean(errors) / np.linalg.norm(change)


def peak_of(act):
    """Bytes that it holds at its peak."""
    tracemalloc.start()
    act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_these_are_all():
    assert {one.name for one in ON_AVERAGE} == {
        name for name in encodings.REGISTRY if encodings.find(name).on_average
    }


@pytest.mark.parametrize("encoding", [Sketch(0.02), Peaks(0.1)])
def test_over_devices_what_they_agree_on_comes_out(encoding):
    known, values = changed(3000)
    change, total, errors = values - known.reference, np.zeros(values.size), []
    for seed in range(1, 257):
        total += read(known, values, seed, encoding)
        if seed in (4, 16, 64, 256):
            errors.append(np.linalg.norm(total / seed - change) / np.linalg.norm(change))
    assert np.dot(total / 256, change) / np.dot(change, change) == pytest.approx(1, abs=0.05)
    np.testing.assert_allclose(np.array(errors[:-1]) / errors[1:], 2, rtol=0.15)  # a root of how many


@pytest.mark.parametrize(
    "encoding", [Sketch(512 / 20_000), Sketch(4096 / 20_000), Peaks(0.01), Peaks(0.02), Peaks(0.05)]
)
def test_the_error_of_one_is_what_its_price_says(encoding):
    assert mean_error(*changed(), encoding) == pytest.approx(encoding.cost.relative_error, rel=0.1)


@pytest.mark.parametrize("make", ON_AVERAGE)
def test_what_waited_goes_along(make):
    known, values = changed(100)
    waited = np.full(100, 3, np.float32)
    with_it = make().encode(values, known, waited, KEY).data
    assert with_it == make().encode(values + waited, known, None, KEY).data


@pytest.mark.parametrize("make", ON_AVERAGE)
def test_nothing_changed_takes_a_byte(make):
    reference = changed(100)[0].reference
    data = make().encode(reference, Known(reference), None, KEY).data
    assert data == b"\1"
    assert make().decode(data, 100, Known(reference)).tobytes() == reference.tobytes()


@pytest.mark.parametrize("encoding", [Sketch(), Sketch(step=4), Peaks()])
def test_without_a_base_and_at_the_ends_of_float32_values_go_as_they_are(encoding):
    values, far = changed(50)[1], np.full(50, 3e38, np.float32)
    for known, given in ((Known(), values), (Known(far), -far)):
        data = encoding.encode(given, known, None, KEY).data
        assert len(data) == 201
        assert encoding.decode(data, 50, known).tobytes() == given.tobytes()
        with raises(PacketCorrupt, "200", "201"):
            encoding.decode(data[:-1], 50, known)


@pytest.mark.parametrize("make", ON_AVERAGE)
def test_tasks_take_none_and_a_share_that_is_none_is_refused(make):
    with pytest.raises(ValueError, match=f"down: {make.name} .*`up`.*lowrank"):
        EncodingSection(down=make.name)
    for bits in (0, -1, 1.5, float("nan")):
        with pytest.raises(SettingError, match="bits"):
            make(bits)


@pytest.mark.parametrize("encoding", [Sketch(0.5, step=3), Peaks(0.5)])
def test_hostile_bytes_are_refused_or_give_so_many_values(encoding):
    draw, (known, values) = KEY.generator(), changed(400)
    good, refused = encoding.encode(values, known, None, KEY).data, 0
    for case in range(500):
        data = bytearray(good if case % 2 else draw.bytes(int(draw.integers(0, 40))))
        for _ in range(int(draw.integers(0, 4)) if data else 0):
            data[int(draw.integers(0, len(data)))] = int(draw.integers(0, 256))
        try:
            found = encoding.decode(bytes(data), 400, known)
        except PacketError:
            refused += 1
            continue
        assert (found.shape, found.dtype) == ((400,), np.float32)
    assert 100 < refused < 500
