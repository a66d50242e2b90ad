"""The vectors of whole rounds notice faults: each that is planted in the product makes them fail."""

from collections import Counter

import pytest
from tests.protocols.methods.conformance.vectors import agree, cases
from tests.protocols.methods.rounds.faults import FAULTS
from tests.protocols.methods.rounds.product import play
from tests.protocols.methods.rounds.vectors import FOLDER

VECTORS = list(cases(FOLDER))


def noticed(method):
    """The vectors of a method that the product does not play as they are."""
    found = []
    for case in VECTORS:
        if case.function == f"{method}:rounds":
            try:
                agree(play(method, case.inputs, case.seed), case.expected, atol=case.atol, rtol=case.rtol)
            except AssertionError:
                found.append(case.name)
    return found


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name, monkeypatch):
    method, plant = FAULTS[name]
    plant(monkeypatch)
    assert noticed(method)


@pytest.mark.parametrize("method", sorted({method for method, _ in FAULTS.values()}))
def test_nothing_is_noticed_without_a_fault(method):
    assert noticed(method) == []


def test_every_method_has_its_faults():
    planted = Counter(method.removesuffix("-bls") for method, _ in FAULTS.values())
    assert set(planted) == {"fedspu", "srp-pfed", "kapc", "fedpurin", "dc-pfl"}
    assert min(planted.values()) >= 4
