"""Steps that a card repeats: when it is shown one, what it is given then, and what cannot be repeated."""

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetune.coordinator.spec.spec_from_torch import describe, draw
from fleetune.edge_agent.training.gpu.cuda_graphs import CudaGraphs, mutable_state
from fleetune.edge_agent.training.gpu.torch_device import PROCESSOR
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.protocols.randomness import Key


class Repeating(CudaGraphs):
    """A processor that repeats as a card does: from tensors that it was shown, into those that it found."""

    def __init__(self):
        super().__init__(PROCESSOR)
        self._enabled = True
        self.num_shown = 0

    def _captured(self, compute, given):
        self.num_shown += 1
        found, due = compute(*given), iter([False])  # a card does nothing while it is shown

        def replay():
            if not next(due, True):
                return
            for place, one in zip(found, compute(*given), strict=True):
                place.copy_(one)

        return replay, given, found


def test_it_is_shown_the_third_and_told_to_do_it_again_with_what_comes():
    recorded, kept, calls = Repeating(), torch.zeros(2), []

    def compute(x):
        calls.append(x)
        kept.copy_(x)
        return (2 * x,)

    for number in range(5):
        x = torch.tensor([1.0, number])
        (found,) = recorded.run("doubled", compute, [x])
        assert torch.equal(found, 2 * x)
        assert torch.equal(kept, x)
    assert recorded.num_shown == 1
    assert len({one.data_ptr() for one in calls[2:]}) == 1


def test_other_shapes_are_another_one():
    recorded = Repeating()
    for size in (1, 2) * 4:
        (found,) = recorded.run(size, lambda x: (x + 1,), [torch.zeros(size)])
        assert found.shape == (size,)
    assert recorded.num_shown == 2


def test_what_cannot_be_shown_is_done_anew():
    recorded = CudaGraphs(PROCESSOR)
    recorded._enabled = True
    recorded._captured = lambda *_: (_ for _ in ()).throw(RuntimeError("it waits for the card"))
    for number in range(6):
        assert recorded.enabled == (number < 5)  # after the third try
        (found,) = recorded.run("x", lambda x: (x + 1,), [torch.tensor([float(number)])])
        assert found.item() == number + 1


def test_a_processor_repeats_nothing():
    assert not CudaGraphs(PROCESSOR).enabled


def backends(module=None):
    """One that repeats and one that does not."""
    if module is None:
        spec, weights = draw("resnet8", (3, 16, 16), 6, Key(3))
        made = [TorchBackend.from_spec(spec) for _ in range(2)]
    else:
        torch.manual_seed(0)
        spec = describe("own", module(), (3, 16, 16), 6)
        made = [TorchBackend(spec, module()) for _ in range(2)]
        weights = np.random.default_rng(5).standard_normal(spec.size).astype(np.float32) / 10
    made[0]._steps._cuda_graphs = Repeating()
    for one in made:
        one.load(weights)
    return made


def steps(backend, **options):
    found, names = [], [tensor.name for tensor in backend.spec.tensors if tensor.kind != "stat"]
    for number in range(12):
        draws = np.random.default_rng(number)
        size = 5 if number % 3 else 4
        x, y = draws.standard_normal((size, 3, 16, 16)).astype(np.float32), draws.integers(0, 6, size)
        loss = backend.step(x, y, Key(number), tensors=names[-2:] if number % 4 == 3 else None, **options)
        found.append((loss, backend.gradient.copy(), backend.weights.copy()))
        backend.weights[: backend.spec.num_parameters] -= (
            backend.gradient[: backend.spec.num_parameters] * 0.001
        )
    return found


def assert_alike(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-6)
        assert all(map(np.array_equal, one[1:], other[1:]))


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Dropout(0.3), nn.Linear(768, 9), nn.Dropout(0.5), nn.Linear(9, 6))


class Noisy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(768, 9), nn.AlphaDropout(0.3), nn.Linear(9, 6))


@pytest.mark.parametrize("module", [None, Dropping, Noisy])
@pytest.mark.parametrize("training", [True, False])
def test_repeated_steps_are_the_same(module, training):
    repeating, other = backends(module)
    assert_alike(steps(repeating), steps(other))
    assert_alike(steps(repeating, training=training), steps(other, training=training))
    assert repeating._steps._cuda_graphs.num_shown >= 2


class Counting(nn.Module):
    """Goes by how often it was asked."""

    def __init__(self):
        super().__init__()
        self.layer, self.asked = nn.Linear(768, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += self.training
        return self.layer(x.flatten(1)) * (1 + self.asked % 2)


class Tossing(Counting):
    """Draws by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1)) * random.random()


class Torchs(Counting):
    """Likewise, by torch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))[:, torch.randperm(6)]


class Choosing(Counting):
    """Goes by what it drew."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.flatten(1))
        return y if torch.rand(()) < 0.5 else functional.dropout(y, 0.3)


@pytest.mark.parametrize("module", [Counting, Tossing, Torchs, Choosing])
def test_a_module_that_does_not_do_the_same_each_time_is_not_repeated(module):
    repeating, other = backends(module)
    random.seed(3)
    ours = steps(repeating)
    random.seed(3)
    assert_alike(ours, steps(other))
    assert not repeating._steps._cuda_graphs.enabled


def test_what_moves():
    module = Counting()
    before = mutable_state(module, PROCESSOR)
    assert before == mutable_state(module, PROCESSOR)
    np.random.random()  # noqa: NPY002
    assert before != mutable_state(module, PROCESSOR)
