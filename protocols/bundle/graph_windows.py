"""Rules for the operators that move a kernel over images: convolutions and pooling. See
`protocols.bundle.graph_rules`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fleetune.protocols.bundle.graph_arrays import Array, Given, Result, Shape, need


@dataclass(frozen=True)
class Windows:
    """The positions of a kernel on an image."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    pads: list[int]

    @classmethod
    def of(cls, given: Given, rank: int, kernel: Sequence[int]) -> "Windows":
        found = cls(
            given.numbers("kernel_shape", kernel),
            given.numbers("strides", [1] * rank),
            given.numbers("dilations", [1] * rank),
            given.numbers("pads", [0] * 2 * rank),
        )
        one_each = (found.kernel, found.strides, found.dilations)
        need(rank > 0 and all(len(each) == rank and min(each) >= 1 for each in one_each), "has no kernel")
        need(len(found.pads) == 2 * rank and min(found.pads) >= 0, f"has pads {found.pads}")
        return found

    def reach(self, axis: int) -> int:
        return self.dilations[axis] * (self.kernel[axis] - 1) + 1

    def around(self, axis: int) -> int:
        return self.pads[axis] + self.pads[axis + len(self.kernel)]

    def over(self, image: Shape) -> Shape:
        """Return the number of kernel positions along each axis of an image."""
        spare = [size + self.around(axis) - self.reach(axis) for axis, size in enumerate(image)]
        found = tuple(one // self.strides[axis] + 1 for axis, one in enumerate(spare))
        need(min(found) >= 1, f"has a kernel larger than {image}")
        return found


def _convolution(given: Given) -> tuple[Array, Array, int, Windows]:
    given.only("kernel_shape strides dilations pads group output_padding")
    x, weight, group = given[0], given[1], given.number("group", 1)
    rank = len(x.shape) - 2
    need(rank >= 1 and len(weight.shape) == rank + 2 and group >= 1, f"is of {x.shape} by {weight.shape}")
    windows = Windows.of(given, rank, weight.shape[2:])
    need(tuple(windows.kernel) == weight.shape[2:] and min(x.shape[2:]) >= 1, "has another kernel")
    return x, weight, group, windows


def conv(given: Given) -> Result:
    x, weight, group, windows = _convolution(given)
    need(x.shape[1] == weight.shape[1] * group and weight.shape[0] % group == 0, "has other channels")
    image = windows.over(x.shape[2:])
    taps = math.prod(weight.shape[1:])
    array = Array(x.type, (x.shape[0], weight.shape[0], *image))
    return Result(array, 2 * array.size * taps, 4 * taps * math.prod(image))


def conv_transpose(given: Given) -> Result:
    x, weight, group, windows = _convolution(given)
    need(x.shape[1] == weight.shape[0] and x.shape[1] % group == 0, "has other channels")
    more = given.numbers("output_padding", [0] * len(windows.kernel))
    need(len(more) == len(windows.kernel) and min(more) >= 0, f"has output_padding {more}")
    image = tuple(
        (size - 1) * windows.strides[axis] + windows.reach(axis) - windows.around(axis) + more[axis]
        for axis, size in enumerate(x.shape[2:])
    )
    need(min(image) >= 1, f"makes an image of {image}")
    taps = math.prod(weight.shape[1:])
    array = Array(x.type, (x.shape[0], weight.shape[1] * group, *image))
    return Result(array, 2 * x.size * taps, 4 * taps * math.prod(x.shape[2:]))


def max_pool(given: Given) -> Result:
    given.only("kernel_shape strides dilations pads")
    x = given[0]
    windows = Windows.of(given, len(x.shape) - 2, [])
    array = Array(x.type, (*x.shape[:2], *windows.over(x.shape[2:])))
    return Result(array, array.size * math.prod(windows.kernel), 8 * array.size)
