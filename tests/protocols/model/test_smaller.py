"""The description of a network with fewer neurons, and what its steps cost."""

from dataclasses import replace

import pytest

from fleetune.coordinator.spec.spec_from_torch import draw
from fleetune.edge_agent.budget.cost_forecast import Capability, ModelSize, demand
from fleetune.protocols.method.choice import RATIOS, DeviceReport
from fleetune.protocols.methods.fedmp import FedMP
from fleetune.protocols.methods.fedspu import FedSPU
from fleetune.protocols.methods.fjord import FjORD
from fleetune.protocols.model.smaller import has_smaller, smaller_spec, smaller_work
from fleetune.protocols.model.spec import Span
from fleetune.protocols.model.spec_check import check_spec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.selection import expected_count, num_active

SHAPES = {"lenet5": (1, 28, 28), "resnet8": (3, 32, 32), "har-cnn": (9, 128)}


@pytest.fixture(scope="module", params=SHAPES)
def spec(request):
    return draw(request.param, SHAPES[request.param], 10, Key(1))[0]


def counts(spec, ratio):
    return [num_active(neurons, ratio) for neurons in spec.groups]


def test_it_has_what_a_sub_model_has(spec):
    small = smaller_spec(spec, counts(spec, 0.4))
    check_spec(small)
    assert small.num_parameters == expected_count(spec, 0.4)
    assert small.groups == tuple(counts(spec, 0.4))
    assert smaller_spec(spec, spec.groups) == spec


def test_work_falls_with_the_ratio_and_less_than_its_square(spec):
    works = [smaller_work(spec, smaller_spec(spec, counts(spec, ratio))) for ratio in RATIOS]
    assert works == sorted(works)
    assert works[-1] == 1
    assert all(ratio**2 < work < 1 for ratio, work in zip(RATIOS[:-1], works, strict=False))
    unknown = replace(spec, tensors=tuple(replace(tensor, uses=0) for tensor in spec.tensors))
    assert smaller_work(unknown, smaller_spec(unknown, counts(unknown, 0.4))) == 1


def test_what_is_no_smaller_network(spec):
    assert has_smaller(spec)
    assert smaller_spec(spec, [0] * len(spec.groups)) is None
    assert smaller_spec(spec, spec.groups[:-1]) is None
    first, *rest = spec.tensors
    half = replace(first, axes=((Span(0, 0, spec.groups[0] // 2),), *first.axes[1:]))
    assert not has_smaller(replace(spec, tensors=(half, *rest)))
    layer_norm = replace(first, name="other.weight", layer="other", kind="norm")
    assert not has_smaller(replace(spec, tensors=(*spec.tensors, layer_norm)))
    without = tuple(replace(one, axes=((),) * len(one.shape)) for one in spec.tensors)
    assert not has_smaller(replace(spec, tensors=without, groups=()))


@pytest.mark.parametrize("method", [FjORD, FedMP])
def test_forecasts_know_what_trains_the_smaller_network(method, spec):
    choice = next(one for one in method(spec).choices(DeviceReport("d")) if one.ratio == 0.4)
    able = Capability(100, 2, 16, ModelSize(4 * spec.size, 1000.0))
    masked, alone = (demand(choice, replace(able, trains_smaller=each)).samples for each in (False, True))
    assert masked == 200
    assert alone == pytest.approx(200 * smaller_work(spec, smaller_spec(spec, counts(spec, 0.4))))
    other = FedSPU(spec).choices(DeviceReport("d"))[3]
    assert demand(other, replace(able, trains_smaller=True)).samples == 200
