"""Every step of every method agrees with its worked cases, each through the product's own function."""

import numpy as np
import pytest

from conformance import dcpfl, fedpurin, fedspu, kapc, srp_pfed
from conformance.vectors import FOLDER, cases

STEPS = {**fedspu.STEPS, **srp_pfed.STEPS, **kapc.STEPS, **fedpurin.STEPS, **dcpfl.STEPS}
CASES = list(cases())


def agree(ours, expected, *, atol, rtol, where="result"):
    if expected is None or isinstance(expected, str):
        assert ours == expected, where
    elif isinstance(expected, dict):
        assert set(map(str, ours)) == set(expected), where
        for key, value in {str(k): v for k, v in ours.items()}.items():
            agree(value, expected[key], atol=atol, rtol=rtol, where=f"{where}.{key}")
    elif isinstance(expected, list) and any(isinstance(e, list | dict | np.ndarray | str) for e in expected):
        assert len(ours) == len(expected), where
        for index, (one, other) in enumerate(zip(ours, expected, strict=True)):
            agree(one, other, atol=atol, rtol=rtol, where=f"{where}[{index}]")
    else:
        wanted = np.asarray(expected)
        assert np.shape(ours) == wanted.shape, where
        np.testing.assert_allclose(
            np.asarray(ours, dtype=float), wanted.astype(float), atol=atol, rtol=rtol, err_msg=where
        )


@pytest.mark.skipif(not CASES, reason=f"no vectors at {FOLDER}; set FLEETUNE_VECTORS to their folder")
def test_every_step_has_an_adapter():
    assert {case.function for case in CASES} <= set(STEPS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_worked_case(case):
    agree(STEPS[case.function](**case.inputs), case.expected, atol=case.atol, rtol=case.rtol)
