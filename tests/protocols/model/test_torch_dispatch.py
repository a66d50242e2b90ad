"""Watching a module compute: the operations that torch counts, and nothing imported that is not needed."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from tests.protocols.model.test_compute_cost import shape_of  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from fleetune.protocols.model.architectures import build, names, training_flops  # noqa: E402
from fleetune.protocols.model.token_ids import blank_batch  # noqa: E402

QUIET = """
import sys
from fleetune.protocols.model.architectures import build, training_flops
from fleetune.protocols.model.token_ids import samples_of
module = build("cnn-kapc", (1, 28, 28), 10)
samples_of(module, (1, 28, 28))
training_flops(module, (1, 28, 28))
print("torch._dynamo" in sys.modules)
"""


class Attention(nn.Module):
    """Of operations that are made of others."""

    def __init__(self, inputs):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Bilinear(8, 8, 3)

    def forward(self, x):
        attended, _ = self.attention(x, x, x)
        return self.head(attended[:, 0], attended[:, 1])


def as_torch_counts(module, shape):
    batch = blank_batch(module, shape)
    with FlopCounterMode(display=False) as counter:
        module(batch).sum().backward()
    return counter.get_total_flops() / len(batch)


@pytest.mark.parametrize("name", names())
def test_operations_are_counted_as_torch_counts_them(name):
    shape = shape_of(name)
    module = build(name, shape, 10)
    assert training_flops(module, shape) == as_torch_counts(module, shape) > 0


def test_operations_that_are_made_of_others_are_counted(recwarn):
    assert training_flops(Attention(8), (4, 8)) == as_torch_counts(Attention(8), (4, 8)) > 0


def test_a_model_is_looked_at_without_torchs_compiler():
    """It takes a second to import, before every simulation and in every agent that trains with torch."""
    said = subprocess.run([sys.executable, "-c", QUIET], check=True, capture_output=True, text=True).stdout
    assert said.strip() == "False"
