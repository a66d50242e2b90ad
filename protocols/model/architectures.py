"""Models by name: networks of the papers, small networks of Fleetune, and any function of the user's.

Coordinator and torch agents build the architecture from its name and exchange only weights. In `protocols`
only this file and its neighbours torch_*.py import torch. Where the order does not matter, pooling stands
before ReLU, which is faster.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.interface import PLAIN, Interface
from fleetune.protocols.model.token_ids import blank_batch, forward_blank
from fleetune.protocols.model.torch_dispatch import CountingFlops
from fleetune.protocols.model.torch_interface import attach
from fleetune.protocols.one_line import suggestion
from fleetune.protocols.user_code import as_line, user_module

Shape = tuple[int, ...]
Build = Callable[..., nn.Module]

# vocabulary of `text-embedding`; `csv:` sources make such ids, see `edge_agent.datasets.csv_table`
VOCABULARY = 8192
_UNPADDED_SIDE = 16  # the smallest image that survives conv5x5, pool2, conv5x5, pool2


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with norm and a shortcut (He et al. 2016).

    The shortcut is the identity, or a 1x1 convolution with norm where the shape changes.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut.add_module("conv", nn.Conv2d(channels_in, channels_out, 1, stride, bias=False))
            self.shortcut.add_module("norm", nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


def names() -> tuple[str, ...]:
    """Return the names of the built-in models."""
    return tuple(_BUILT_IN)


def build(name: str, input_shape: Shape, num_classes: int, interface: Interface = PLAIN) -> nn.Module:
    """Build the model `name`, initialised from torch's global generator, in training mode.

    Args:
        name: one of `names()`, or `package.module:function`, called as function(input_shape, num_classes).
            With several inputs, it gets their shapes by name instead of `input_shape`.
        input_shape: shape of one sample without the batch axis: (channels, height, width) for images.
        num_classes: number of logits.
        interface: the model's inputs, if there are several, and its output.

    Raises:
        ModelError: there is no such model or function, it returns no module, or the module cannot take this
            input or does not give `num_classes` logits.
    """
    module = untried(name, input_shape, num_classes, interface)
    if name not in _BUILT_IN:
        attach(name, module, interface)
    try_out(name, module, input_shape, num_classes)
    return module.train()


def untried(name: str, input_shape: Shape, num_classes: int, interface: Interface = PLAIN) -> nn.Module:
    """Return what the model's function returns, see `build`.

    Raises:
        ModelError: there is no such model or function, or it returns no module.
    """
    function = _BUILT_IN[name] if name in _BUILT_IN else _load(name)
    if interface.inputs and name in _BUILT_IN:
        raise ModelError(f"model {name!r} takes one input; leave model.inputs out")
    shapes = {one.name: one.shape for one in interface.inputs} or input_shape
    try:
        module = function(shapes, num_classes)
    except Exception as problem:  # a user's function may raise anything
        where = f"input {shapes} and {num_classes} classes"
        raise ModelError(f"model {name!r} cannot be built for {where}: {as_line(problem)}") from problem
    if not isinstance(module, nn.Module):
        raise ModelError(f"model {name!r} returned {type(module).__name__}; return a torch.nn.Module")
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise ModelError(
                f"model {name!r}: {path or 'the model itself'} is a TorchScript module, whose layers are"
                " hidden; return the nn.Module that it was made from"
            )
    for path, one in module.named_parameters():
        if one.dtype == torch.float64:
            raise ModelError(
                f"model {name!r}: parameter {path} is float64; models train in float32: return module.float()"
            )
    return module


def try_out(name: str, module: nn.Module, input_shape: Shape, num_classes: int) -> Tensor:
    """Return the logits of two zero samples in evaluation mode, shape (2, num_classes).

    A model that rejects float samples gets whole numbers. Weights, statistics and training modes do not
    change.

    Raises:
        ModelError: the forward pass fails or its output has another shape.
    """
    try:
        _, logits = forward_blank(module, input_shape)
    except ModelError:
        raise
    except Exception as problem:  # a user's module may raise anything
        raise ModelError(f"model {name!r} cannot take input {input_shape}: {as_line(problem)}") from problem
    if not isinstance(logits, Tensor) or logits.shape != (2, num_classes):
        found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ModelError(f"model {name!r} gives {found} for two samples; it must give (2, {num_classes})")
    return logits


def _load(name: str) -> Build:
    """Return the user's function named `package.module:function`."""
    path, colon, function = name.partition(":")
    if not colon:
        raise ModelError(
            f"model {name!r} is unknown; {suggestion(name, names())} (your own: package.module:function)"
        )
    try:
        module = user_module(path)
    except Exception as problem:  # a user's file may raise anything
        raise ModelError(
            f"model {name!r}: module {path!r} cannot be imported: {as_line(problem)}"
        ) from problem
    found = getattr(module, function, None)
    if not callable(found):
        raise ModelError(f"model {name!r}: module {path!r} has no function {function!r}")
    return cast("Build", found)


def _sequential(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def _with_head(
    features: nn.Sequential, widths: Shape, input_shape: Shape, num_classes: int, *, bias: bool = True
) -> nn.Sequential:
    """Return `features`, flattened, then fully connected layers of `widths` with ReLU, and a last layer.

    The last layer has `num_classes` outputs.
    """
    features.add_module("flatten", nn.Flatten())
    size = math.prod(forward_blank(features, input_shape)[1].shape[1:])
    for index, width in enumerate(widths, start=1):
        features.add_module(f"fc{index}", nn.Linear(size, width, bias=bias))
        features.add_module(f"fc{index}_relu", nn.ReLU())
        size = width
    features.add_module("out", nn.Linear(size, num_classes))
    return features


def _mlp(input_shape: Shape, num_classes: int) -> nn.Module:
    return _with_head(_sequential(), (64, 32), input_shape, num_classes)


def _autoencoder(input_shape: Shape, num_outputs: int) -> nn.Module:
    """Return an autoencoder with a bottleneck of 16 numbers, for reconstruction."""
    return _with_head(_sequential(), (64, 16, 64), input_shape, num_outputs)


class TextEmbedding(nn.Module):
    """The mean of the words' vectors, then one layer (as fastText, Joulin et al. 2017).

    Id 0 is padding and is left out of the mean.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.out = nn.Linear(16, num_classes)

    def forward(self, ids: Tensor) -> Tensor:
        there = ids.clamp(0, 1).to(torch.float32)[:, :, None]
        count = there.sum(1).clamp(min=1.0)
        return cast("Tensor", self.out((self.embedding(ids) * there).sum(1) / count))


def _text_embedding(_: Shape, num_classes: int) -> nn.Module:
    return TextEmbedding(num_classes)


def _classic(channels: Shape, widths: Shape, *, padded: bool = False) -> Build:
    """Return a builder of two 5x5 convolutions with pooling and ReLU, and fully connected layers.

    As LeCun et al. 1998. Without `padded`, only images smaller than 16x16 are padded, because both
    convolutions would leave no pixels.
    """

    def make(input_shape: Shape, num_classes: int) -> nn.Module:
        padding = 2 if padded or min(input_shape[1:], default=0) < _UNPADDED_SIDE else 0
        features = _sequential(
            conv1=nn.Conv2d(input_shape[0], channels[0], 5, padding=padding),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(channels[0], channels[1], 5, padding=padding),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
        )
        return _with_head(features, widths, input_shape, num_classes)

    return make


def _moon(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return MOON's network for CIFAR-10: LeNet-5 with a projection before its last layer."""
    module = cast("nn.Sequential", _classic((6, 16), (120, 84))(input_shape, num_classes))
    del module.out
    module.add_module("project1", nn.Linear(84, 84))
    module.add_module("project1_relu", nn.ReLU())
    module.add_module("project2", nn.Linear(84, 256))
    module.add_module("out", nn.Linear(256, num_classes))
    return module


def _fedspu(channels: Shape, widths: Shape) -> Build:
    """Return a builder of FedSPU's networks, as docs/methods.md describes them.

    Two padded 3x3 convolutions, each with norm, pooling and ReLU, and fully connected layers, of which only
    the last has a bias.
    """

    def make(input_shape: Shape, num_classes: int) -> nn.Module:
        features = _sequential(
            conv1=nn.Conv2d(input_shape[0], channels[0], 3, padding=1),
            norm1=nn.BatchNorm2d(channels[0]),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(channels[0], channels[1], 3, padding=1),
            norm2=nn.BatchNorm2d(channels[1]),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
        )
        return _with_head(features, widths, input_shape, num_classes, bias=False)

    return make


def _resnet(stem: dict[str, nn.Module], blocks: list[tuple[int, int]], num_classes: int) -> nn.Module:
    """Return a residual network: stem of 64 channels, `blocks` of (channels, stride), mean over the image,
    fc.
    """
    layers = dict(stem)
    size = 64
    for index, (channels, stride) in enumerate(blocks, start=1):
        layers[f"block{index}"] = BasicBlock(size, channels, stride)
        size = channels
    pool, flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return _sequential(**layers, pool=pool, flatten=flatten, out=nn.Linear(size, num_classes))


def _resnet8(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return FedPURIN's network for Fashion-MNIST and CIFAR-10: 7x7 stem, one block each of 64, 128, 256."""
    stem = {
        "conv": nn.Conv2d(input_shape[0], 64, 7, stride=2, padding=3, bias=False),
        "norm": nn.BatchNorm2d(64),
        "stem_pool": nn.MaxPool2d(3, stride=2, padding=1),
        "relu": nn.ReLU(),
    }
    return _resnet(stem, [(64, 1), (128, 2), (256, 2)], num_classes)


def _resnet18(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return ResNet-18 for small images: 3x3 stem without pooling. Its 20 convolutions and fc are KAPC's 21
    layers.
    """
    stem = {
        "conv": nn.Conv2d(input_shape[0], 64, 3, padding=1, bias=False),
        "norm": nn.BatchNorm2d(64),
        "relu": nn.ReLU(),
    }
    blocks = [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)]
    return _resnet(stem, blocks, num_classes)


def _har_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    """Return 1-D convolutions over windows of sensor readings, (channels, time steps), e.g. (9, 128)."""
    features = _sequential(
        conv1=nn.Conv1d(input_shape[0], 32, 5),
        pool1=nn.MaxPool1d(2),
        relu1=nn.ReLU(),
        conv2=nn.Conv1d(32, 64, 5),
        pool2=nn.MaxPool1d(2),
        relu2=nn.ReLU(),
    )
    return _with_head(features, (64,), input_shape, num_classes)


_BUILT_IN: dict[str, Build] = {
    "mlp": _mlp,
    "autoencoder": _autoencoder,
    "text-embedding": _text_embedding,
    "lenet5": _classic((6, 16), (120, 84)),
    "lenet-dcpfl": _classic((16, 32), (120, 84), padded=True),  # docs/methods.md explains its size
    "cnn-moon": _moon,
    "cnn-kapc": _classic((32, 64), (512, 128)),
    "cnn-fedspu-cifar": _fedspu((6, 16), (120, 84)),
    "cnn-fedspu-emnist": _fedspu((20, 20), ()),
    "resnet8": _resnet8,
    "resnet18": _resnet18,
    "har-cnn": _har_cnn,
}


def training_flops(module: nn.Module, input_shape: Shape) -> float:
    """Return the floating-point operations of one training step, for each sample.

    Forward and backward passes of matrix products and convolutions count, as in torch. No gradients remain.
    """
    batch = blank_batch(module, input_shape)
    with CountingFlops() as counting:
        module(batch).sum().backward()
    module.zero_grad()
    return float(counting.total) / len(batch)
