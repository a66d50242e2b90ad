"""The sketch encoding: a fiftieth of a bit for an entry, right on average, and no harm by any bytes."""

import struct

import numpy as np
import pytest
from tests.protocols.update.test_on_average import KEY, changed, peak_of

from fleetune.protocols.errors import PacketCorrupt, SettingError
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.sketch import Sketch


@pytest.mark.parametrize(("bits", "num_sums"), [(0.0001, 16), (0.02, 512), (0.1, 2048), (1, 16_384)])
def test_it_takes_a_bit_a_sum_and_eight_bytes(bits, num_sums):
    known, values = changed()
    assert num_sums / 8 < len(Sketch(bits).encode(values, known, None, KEY).data) <= num_sums / 8 + 8


def test_products_first_leave_less_to_sums():
    draw = KEY.generator()
    matrix = draw.normal(0, 1, (100, 2)) @ draw.normal(0, 1, (2, 200)) + draw.normal(0, 0.3, (100, 200))
    known = Known(np.ones(matrix.size, np.float32), row_sizes=(200,))
    values = known.reference + matrix.astype(np.float32).ravel()
    sizes, errors = [], []
    for step in (0, 8, 2):
        data = Sketch(step=step).encode(values, known, None, KEY).data
        sizes.append(len(data))
        errors.append(np.linalg.norm(Sketch().decode(data, values.size, known) - values))
    assert sizes == sorted(sizes)
    assert errors == sorted(errors, reverse=True)
    data = [Sketch(step=4).encode(values, known, None, Key(seed)).data for seed in range(200)]
    mean = np.mean([Sketch().decode(one, values.size, known) for one in data], axis=0)
    assert np.linalg.norm(mean - values) < 0.3 * np.linalg.norm(values - known.reference)


def test_a_step_that_is_none_is_refused():
    for step in (-1, float("nan"), float("inf")):
        with pytest.raises(SettingError, match="step"):
            Sketch(step=step)


def forged(log, scale, length):
    return b"\3" + struct.pack("<BHf", log, 7, scale) + bytes(length)


@pytest.mark.parametrize(
    ("data", "about"),
    [
        (b"", "0 bytes begins with b''"),
        (b"\x0b" + bytes(40), "41 bytes begins"),
        (b"\1\1", "2 bytes; expected 1"),
        (forged(10, 1.0, 128), "of 400 values has 2\\^10 sums"),
        (forged(200, 1.0, 128), "2\\^200 sums"),
        (forged(5, float("inf"), 4), "scale inf"),
        (forged(5, -1.0, 4), "scale -1"),
        (forged(5, 1.0, 5), "have 13 bytes; expected 12"),
    ],
)
def test_what_no_writer_wrote_is_refused(data, about):
    with pytest.raises(PacketCorrupt, match=about):
        Sketch().decode(data, 400, Known(np.ones(400, np.float32)))


def test_reading_and_writing_take_little_beside_the_values():
    count = 2_000_000
    known = Known(np.ones(count, np.float32))
    values = 1 + KEY.generator().normal(0, 1, count).astype(np.float32)
    good = Sketch().encode(values, known, None, KEY).data

    assert peak_of(lambda: Sketch().encode(values, known, None, KEY)) < 4_000_000
    assert peak_of(lambda: Sketch().decode(good, count, known)) < 4 * count + 4_000_000
    most = forged(21, 1.0, 2**18)  # as many sums as there are entries
    assert peak_of(lambda: Sketch().decode(most, count, known)) < 25 * count
