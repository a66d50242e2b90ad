"""The peaks encoding: fewer bits than `sketch` for the same noise, right on average, no harm by any bytes."""

import numpy as np
import pytest
from tests.helpers.errors import raises
from tests.protocols.update.test_on_average import KEY, changed, mean_error, peak_of

from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.update.encodings.encoding import Known
from fleetune.protocols.update.encodings.peaks import _HEIGHTS, Peaks
from fleetune.protocols.update.encodings.sketch import Sketch


@pytest.mark.parametrize(("bits", "num_bytes"), [(0.0001, 16), (0.01, 25), (0.1, 250), (1, 2500)])
def test_it_takes_its_bits_and_five_bytes(bits, num_bytes):
    known, values = changed()
    assert len(Peaks(bits).encode(values, known, None, KEY).data) == num_bytes + 5


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


def forged(log, told, scale=b"\x80\x3f"):
    return bytes([2 + log, 7, 0]) + scale + told


@pytest.mark.parametrize(
    ("data", "about"),
    [
        (b"", "0 bytes begin with b''"),
        (b"\x0d" + bytes(40), "41 bytes begin"),
        (b"\1\1", "2 bytes; expected 1"),
        (forged(3, b""), "middle of a group"),
        (forged(10, b"\1"), "middle of a group"),
        (forged(10, bytes(11 * 16)), "131072 sums"),
        (forged(3, b"\1", scale=b"\x80\x7f"), "scale inf"),
        (forged(3, b"\1", scale=b"\x80\xbf"), "scale -1"),
        (forged(3, b"\1", scale=b"\0\0"), "scale 0"),
    ],
)
def test_what_no_writer_wrote_is_refused(data, about):
    with pytest.raises(PacketCorrupt, match=about):
        Peaks().decode(data, 400, Known(np.ones(400, np.float32)))
    with raises(PacketCorrupt, "reference model"):
        Peaks().decode(forged(3, b"\1"), 400, Known())


def test_reading_and_writing_take_little_beside_the_values():
    count = 2_000_000
    known = Known(np.ones(count, np.float32))
    values = 1 + KEY.generator().normal(0, 1, count).astype(np.float32)
    good = Peaks().encode(values, known, None, KEY).data

    assert peak_of(lambda: Peaks().encode(values, known, None, KEY)) < 3 * count * 4
    assert peak_of(lambda: Peaks().decode(good, count, known)) < 2 * count * 4
    small = forged(10, bytes(11 * 32))  # 256 groups of 1,024
    assert peak_of(lambda: Peaks().decode(small, count, known)) < 2 * count * 4
    most = forged(0, bytes(2**18))  # as many sums as there are entries
    assert peak_of(lambda: Peaks().decode(most, count, known)) < 28 * count
