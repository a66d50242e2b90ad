"""Samples given as tensors of torch, and groups with gaps."""

import numpy as np
import pytest
import torch

from fleetune.edge_agent.datasets.dataset import make_dataset
from fleetune.protocols.errors import DataError

X = np.arange(24, dtype=np.float32).reshape(6, 4)
Y = np.arange(6) % 3


@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(X, requires_grad=True),
        torch.tensor(X, dtype=torch.bfloat16),
        torch.tensor(X, dtype=torch.bfloat16, requires_grad=True),
        torch.tensor(X, dtype=torch.float64),
        [torch.tensor(row, requires_grad=True) for row in X],
    ],
)
def test_tensors_are_samples(x):
    found = make_dataset("data", x, torch.tensor(Y), group=torch.tensor(Y), test=torch.tensor(Y) == 0)
    np.testing.assert_array_equal(found.x, X)
    np.testing.assert_array_equal(found.y, Y)
    np.testing.assert_array_equal(found.group, Y)
    np.testing.assert_array_equal(found.test, Y == 0)


def test_tensors_of_several_lengths_are_one_line():
    with pytest.raises(DataError, match=r"data: x is not an array: "):
        make_dataset("data", [torch.zeros(2), torch.zeros(3)], [0, 1])


@pytest.mark.parametrize(
    ("group", "line"),
    [
        (["a", "b", None, "c", None, "d"], r"group of sample 2 is None, and 2 of 6 samples have none"),
        ([0.0, 1.0, 2.0, np.nan, 1.0, 0.0], r"group of sample 3 is nan, and 1 of 6 samples have none"),
        (np.array(["a", 1, 2, 3, 4, 5], object), r"group mixes int and str; give names of one type"),
    ],
)
def test_a_sample_without_a_group_is_one_line(group, line):
    with pytest.raises(DataError, match=line):
        make_dataset("data", X, Y, group=group)
