"""What is sent alike is written once and, in one process, read once; and nobody gets another's."""

from types import SimpleNamespace

import numpy as np
import pytest

from fleetune.protocols.update.reference_model import (
    ReferenceModel,
    ReferenceModelCache,
    num_remembered,
    same_bits,
)
from fleetune.protocols.update.shared_payload_cache import DecodeCache, EncodeCache

SIZE = 1000
MASK = np.ones(SIZE, np.bool_)


def values(first=0.0):
    found = np.arange(SIZE, dtype=np.float32)
    found[0] = first
    return found


class Counting:
    def __init__(self, made):
        self.made, self.times = made, 0

    def __call__(self):
        self.times += 1
        return self.made


def test_the_same_is_written_once_and_what_was_changed_in_place_again():
    written, mine = EncodeCache(), values()
    first, again, changed = Counting(("a", [1], b"1")), Counting(None), Counting(("a", [1], b"2"))
    assert written.found("lossless", MASK, mine, first) == ("a", [1], b"1")
    assert written.found("lossless", MASK, values(), again) == ("a", [1], b"1")
    mine[-1] = 5
    assert written.found("lossless", MASK, mine, changed) == ("a", [1], b"2")
    assert (first.times, again.times, changed.times) == (1, 0, 1)


@pytest.mark.parametrize("what", ["how", "entries", "minus zero"])
def test_it_is_written_again_when_anything_differs(what):
    written, other = EncodeCache(), Counting(("a", [1], b"2"))
    written.found("lossless", MASK, values(), lambda: ("a", [1], b"1"))
    mask = MASK.copy()
    mask[-1] = what != "entries"
    around = "int8" if what == "how" else "lossless"
    written.found(around, mask, values(-0.0 if what == "minus zero" else 0.0), other)
    assert other.times == 1


def test_what_is_read_once_is_everybodys_own():
    before = DecodeCache()
    first, again = Counting(values()), Counting(None)
    before.found("lossless base", b"data", MASK, first)[:] = -1
    assert before.found("lossless base", b"data", MASK, again).tobytes() == values().tobytes()
    assert (first.times, again.times) == (1, 0)


@pytest.mark.parametrize(
    ("about", "data", "part"),
    [("int8 base", b"data", 1), ("lossless base", b"date", 1), ("lossless base", b"data", 0)],
)
def test_it_is_read_again_when_anything_differs(about, data, part):
    before, other = DecodeCache(), Counting(values(7.0))
    before.found("lossless base", b"data", MASK, values)
    mask = MASK.copy()
    mask[5] = bool(part)
    assert before.found(about, data, mask, other)[0] == 7.0
    assert other.times == 1


def test_a_base_that_is_met_again_is_the_one_that_has_its_digest():
    known = ReferenceModelCache(most=2)
    first = known.known(ReferenceModel.whole(values()))
    assert known.known(ReferenceModel.whole(values())) is first
    for number in (1.0, 2.0):
        assert (
            known.known(ReferenceModel.whole(values(number))).digest
            == ReferenceModel.whole(values(number)).digest
        )
    assert known.known(ReferenceModel.whole(values())) is not first, "two are remembered"


@pytest.mark.parametrize(("size", "most"), [(0, 2**24 // 5), (44_426, 75), (582_026, 5), (10_000_000, 2)])
def test_more_small_bases_are_remembered_than_large_ones(size, most):
    assert num_remembered(SimpleNamespace(size=size)) == most


def test_bases_that_begin_alike_are_told_apart():
    known, others = ReferenceModelCache(most=9), []
    for number in range(9):
        found = values()
        found[-1 - number] = -1
        others.append(known.known(ReferenceModel.whole(found)))
    assert len({id(one) for one in others}) == 9
    again = others[3].values.copy()
    assert known.known(ReferenceModel.whole(again)) is others[3]


def test_a_base_that_holds_less_is_another_one():
    known = ReferenceModelCache()
    whole = known.known(ReferenceModel.whole(values()))
    half = ReferenceModel(values(), np.arange(SIZE) < 500)
    assert known.known(half) is half
    assert half.digest != whole.digest


def test_the_same_bits_are_more_than_the_same_numbers():
    assert same_bits(values(np.nan), values(np.nan))
    assert not same_bits(values(0.0), values(-0.0))
    assert not same_bits(values(), values().astype(np.float64))
    assert not same_bits(values(), values()[:-1])
    last = values()
    last[-1] += 1
    assert not same_bits(values(), last)
