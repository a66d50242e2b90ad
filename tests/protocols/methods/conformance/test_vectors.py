"""Every step of every method agrees with its worked cases, each through the product's own function."""

import pytest

from conformance import dcpfl, fedpurin, fedspu, kapc, srp_pfed
from conformance.vectors import FOLDER, agree, cases

STEPS = {**fedspu.STEPS, **srp_pfed.STEPS, **kapc.STEPS, **fedpurin.STEPS, **dcpfl.STEPS}
CASES = list(cases())


@pytest.mark.skipif(not CASES, reason=f"no vectors at {FOLDER}; set FLEETUNE_VECTORS to their folder")
def test_every_step_has_an_adapter():
    assert {case.function for case in CASES} <= set(STEPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_worked_case(case):
    agree(STEPS[case.function](**case.inputs), case.expected, atol=case.atol, rtol=case.rtol)
