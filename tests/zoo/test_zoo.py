"""Real models export, and train alike in both trainers; `make nightly` tries them all."""

from collections import Counter

import pytest
from tests.zoo.measure import GRADIENT_FLOOR, WEIGHTS_FLOOR, examine_apart, excess, missing_package
from tests.zoo.models import COUNTS, FIXED, NOT_YET, UNFIXED, ZOO


def test_each_family_has_its_models():
    found = Counter(model.family for model in ZOO)
    assert {family for family, least in COUNTS.items() if found[family] < least} == set()
    assert len({model.name for model in ZOO}) == len(ZOO)
    assert NOT_YET.keys() <= {model.name for model in FIXED}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ZOO, ids=lambda model: model.name)
def test_a_model_trains_alike_in_both_trainers(model):
    if package := missing_package(model):
        pytest.skip(f"{package} is not installed; `make nightly` installs it: pip install -e '.[zoo]'")
    outcome = examine_apart(model)
    if model.family == UNFIXED:
        assert outcome.refusal
        return
    if model.name in NOT_YET:
        assert NOT_YET[model.name] in outcome.refusal, "remove it from NOT_YET if it exports"
        return
    assert outcome.refusal == ""
    assert excess(outcome.gradient_error, outcome.torch_gradient_error, GRADIENT_FLOOR) <= 1
    assert excess(outcome.weights_error, outcome.torch_weights_error, WEIGHTS_FLOOR) <= 1
