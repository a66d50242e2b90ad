"""The network `cnn`, made of torch's own layers only, so that every simulator can load it."""

from torch import nn


def cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Two 5x5 convolutions of 32 and 64 channels, each with pooling and ReLU, and a layer of 512: with 28x28
    images and ten classes 582,026 parameters.
    """
    channels, height, width = input_shape
    side = ((height - 4) // 2 - 4) // 2, ((width - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * side[0] * side[1], 512),
        nn.ReLU(),
        nn.Linear(512, num_classes),
    )
