"""What a step costs that trains a part: against the operations that torch counts, and worked numbers."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from tests.conftest import tiny_spec
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fleetune.coordinator.spec.spec_from_torch import describe, draw
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.errors import PacketCorrupt
from fleetune.protocols.method.choice import RATIOS, DeviceReport
from fleetune.protocols.methods import create
from fleetune.protocols.model.architectures import build, names, training_flops
from fleetune.protocols.model.compute_cost import below_largest, compute_cost, step_products, trained_tensors
from fleetune.protocols.model.spec import ModelSpec, TensorSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update import codec
from fleetune.protocols.update.selection import Everything, Layers, Neurons

KEY = Key.of("tests", "effort")


def shape_of(name):
    return {"har-cnn": (9, 128), "text-embedding": (24,)}.get(name, (3, 32, 32))


def chain(*sizes):
    """Linear layers with bias, each multiplying once; entries in the weights by `sizes`."""
    tensors = []
    for index, size in enumerate(sizes):
        tensors.append(TensorSpec(f"{index}.weight", (size,), "weight", f"{index}", ((),), uses=1))
        tensors.append(TensorSpec(f"{index}.bias", (1,), "bias", f"{index}", ((),)))
    return ModelSpec("chain", tuple(tensors), (), (1,), 2)


@pytest.mark.parametrize("name", names())
def test_a_full_step_is_what_torch_counts(name):
    spec, _ = draw(name, shape_of(name), 10, KEY)
    assert 2 * step_products(spec) == training_flops(build(name, shape_of(name), 10), shape_of(name))


@pytest.mark.parametrize("name", ["lenet5", "cnn-fedspu-cifar", "har-cnn", "mlp"])
def test_a_part_of_a_step_is_what_torch_counts(name):
    spec, _ = draw(name, shape_of(name), 10, KEY)
    backend = TorchBackend.from_spec(spec)
    x, y = np.zeros((2, *shape_of(name)), np.float32), np.zeros(2, np.int64)
    parameters = [tensor.name for tensor in spec.tensors if tensor.kind != "stat"]
    for tensors in [(), *combinations(parameters, 1), *combinations(parameters, 2)]:
        with FlopCounterMode(display=False) as counter:
            backend.step(x, y, KEY, tensors=tensors)
        assert 2 * 2 * step_products(spec, tensors) == counter.get_total_flops()


def test_worked_numbers():
    spec = chain(10, 20, 30)  # forward 60, inputs' gradients 50, weights' 60
    tensors = [(), ("0.bias",), ("1.weight",), ("1.bias", "2.weight"), ("2.bias",), None]
    assert [step_products(spec, some) for some in tensors] == [60, 110, 110, 120, 60, 170]
    assert compute_cost(spec, Layers(("2",)).mask(spec)) == 90 / 170
    assert compute_cost(spec, Layers(("0", "1", "2")).mask(spec)) == 1
    one_entry = np.arange(spec.size) == 12  # of layer 1's weight: the whole of it is computed
    assert trained_tensors(one_entry, spec) == {"1.weight"}
    assert compute_cost(spec, one_entry) == 110 / 170


def test_neurons_save_nothing():
    spec, _ = draw("lenet5", (3, 32, 32), 10, KEY)
    assert compute_cost(spec, Neurons(0.1, 1).mask(spec)) == 1


def test_what_is_not_known_counts_as_a_full_step():
    spec = replace(chain(3, 4), tensors=tuple(replace(tensor, uses=0) for tensor in chain(3, 4).tensors))
    assert compute_cost(spec, np.zeros(spec.size, dtype=bool)) == 1


class Uses(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.tokens, self.twice = nn.Embedding(9, 8), nn.Linear(8, 6), nn.Linear(6, 6)
        self.grouped, self.odd = nn.Conv1d(6, 4, 3, stride=2, groups=2), nn.Parameter(torch.ones(4, 10))

    def forward(self, x):
        x = self.twice(F.relu(self.twice(self.tokens(self.embedding(x)))))
        return self.grouped(x.transpose(1, 2)).mean(2) @ self.odd


def test_uses_are_counted_for_one_sample():
    spec = describe("uses", Uses(), (7,), 10)
    uses = {tensor.name: tensor.uses for tensor in spec.tensors if tensor.uses}
    assert uses == {"tokens.weight": 7, "twice.weight": 14, "grouped.weight": 3, "odd": 1}


def test_uses_travel_but_do_not_tell_models_apart():
    spec, _ = draw("lenet5", (3, 32, 32), 10, KEY)
    other = replace(spec, tensors=tuple(replace(tensor, uses=5) for tensor in spec.tensors))
    assert other.hash == spec.hash != replace(spec, num_classes=11).hash
    assert codec.decode(codec.encode(spec, spec), ModelSpec, None) == spec
    negative = replace(spec, tensors=(replace(spec.tensors[0], uses=-1),))
    with pytest.raises(PacketCorrupt):
        codec.decode(codec.encode(negative, spec), ModelSpec, None)


def epochs_of(name, spec, run_epochs=1, **settings):
    [*_, choice] = create(name, spec, settings).choices(DeviceReport("d"))
    return choice.cost.epochs(run_epochs)


def test_methods_that_train_a_part_ask_for_less():
    spec = chain(10, 20, 30)
    head, body, nothing = 90 / 170, 140 / 170, 60 / 170
    assert epochs_of("fedrep", spec, 2, head_epochs=4) == pytest.approx(2 * body + 4 * head)
    assert epochs_of("fedrep", spec, 2, head_epochs=4, body_epochs=3) == pytest.approx(3 * body + 4 * head)
    assert epochs_of("fedbabu", spec, 2, fine_tuning_epochs=3) == pytest.approx(2 * body + 3 * head)
    assert epochs_of("fedbabu", spec, 2, fine_tuned="all", fine_tuning_epochs=3) == pytest.approx(
        2 * body + 3
    )
    assert epochs_of("per-fedavg", spec, 2, steps=1, adaptation_steps=1) == pytest.approx(3 + nothing)
    assert epochs_of("per-fedavg", spec, 2) == pytest.approx(2 + 1 + nothing)
    assert epochs_of("per-fedavg", spec, 3, approximation="hessian-free") == pytest.approx(4 + 1 + nothing)
    assert epochs_of("ditto", spec, 3) == 6
    assert epochs_of("ditto", spec, 3, personal_epochs=5) == 3 + 5
    assert epochs_of("fedavg", spec, 2) == epochs_of("fedspu", spec, 2) == 2


def test_shallow_steps_ask_for_less_the_lower_the_ratio():
    spec = chain(10, 20, 5)
    assert below_largest(spec) == spec.layers["1"].start == 10 + 1
    shallow = (10 + 20 + 5 + 20 + 5 + 5) / (3 * 35 - 10)  # forward; two weights' gradients; one passed on
    works = [
        choice.cost.work
        for choice in create("fedspu", spec, {"shallow_steps": True}).choices(DeviceReport("d"))
    ]
    assert works == pytest.approx([max(p, 0.25) + (1 - max(p, 0.25)) * shallow for p in RATIOS])
    assert epochs_of("fedspu", chain(20, 10), 2, shallow_steps=True) == 2, "nothing is below the largest"


def test_perfedmask_asks_for_no_less_than_any_layers_it_may_train():
    spec, _ = draw("cnn-kapc", (1, 28, 28), 10, KEY)
    method = create("perfedmask", spec, {})
    sizes = [layers.count(spec) for layers in method.maskable]
    works = [choice.cost.work for choice in method.choices(DeviceReport("d"))]
    assert works == sorted(works)
    assert works[0] < 1
    for choice in method.choices(DeviceReport("d")):
        for count in range(1, len(sizes) + 1):
            for some in combinations(range(len(sizes)), count):
                if sum(sizes[i] for i in some) <= choice.ratio * sum(sizes):
                    taken = Layers(tuple(name for i in some for name in method.maskable[i].names))
                    assert compute_cost(spec, taken.mask(spec)) <= choice.cost.work


def test_everything_is_a_full_step():
    spec = tiny_spec()
    assert compute_cost(spec, Everything().mask(spec)) == 1
