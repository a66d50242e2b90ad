"""Networks of about 10^4 to 10^8 parameters, as `model.name` in a run.toml names them."""

from functools import partial

from torch import nn


def _network(parameters: int, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """One hidden layer, for samples of 64 numbers."""
    inputs = int(input_shape[0] * input_shape[1] * input_shape[2])
    width = round(parameters / (inputs + num_classes + 1))
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, num_classes))


p4, p5, p6, p7, p8 = (partial(_network, 10**power) for power in range(4, 9))
