"""The sizes of a convolution, and the forms of it that they allow."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.export.torch_trace import Size

_MIN_CHANNELS = 16  # for patches in a matrix: below, its short runs cost more than the products gain


@dataclass(frozen=True)
class Geometry:
    """The sizes of a convolution from images `x` to images `y`.

    For a transposed convolution, `y` is its input and `x` its result.

    Attributes:
        samples: the number of images.
        groups: the number of groups of channels.
        x, y: the height and width, or the length.
        kernel, stride, padding, dilation: one number for each axis of the image.
        channels: the number of channels of x and y.
    """

    samples: Size
    groups: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    channels: tuple[int, int]

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes of ONNX's Conv and ConvTranspose operators."""
        return {
            "kernel_shape": self.kernel,
            "strides": self.stride,
            "pads": (*self.padding, *self.padding),
            "dilations": self.dilation,
            "group": self.groups,
        }

    @property
    def spare(self) -> tuple[int, ...]:
        """Number of last pixels of x along each axis, padding included, that no patch reaches."""
        return tuple(
            size + 2 * padding - (number - 1) * stride - (taps - 1) * dilation - 1
            for size, number, taps, stride, padding, dilation in zip(
                self.x, self.y, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    @property
    def in_matrix(self) -> bool:
        """True if a matrix of patches is faster than ONNX Runtime's Conv."""
        return self.groups == 1 and self.channels[0] >= _MIN_CHANNELS

    @property
    def in_channels(self) -> bool:
        """True if each pixel is a product of its channels with the weights: a kernel of one pixel."""
        ones = {*self.kernel, *self.stride}
        return self.in_matrix and ones == {1} and not any(self.padding)

    @property
    def depthwise(self) -> bool:
        """True if each channel of the result depends on one channel of the input."""
        return self.groups == self.channels[0] > 1

    @property
    def in_runs(self) -> bool:
        """True if each kernel position reads contiguous inputs in each channel: one axis, stride 1, one
        group.
        """
        return self.groups == 1 and self.stride == (1,)

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @cached_property
    def pixels(self) -> NDArray[np.int64]:
        """Index in the padded image x that each kernel position of each patch reads, shape (pixels of y *
        taps,).
        """
        count = len(self.y)
        starts, taps = np.indices((*self.y, *self.kernel)).reshape(2, count, -1)
        strides, dilations = (np.array(one)[:, None] for one in (self.stride, self.dilation))
        padded = [size + 2 * padding for size, padding in zip(self.x, self.padding, strict=True)]
        places: NDArray[np.int64] = np.ravel_multi_index(tuple(starts * strides + taps * dilations), padded)
        return places

    @cached_property
    def choice(self) -> NDArray[np.float32]:
        """Matrix of 0 and 1 that copies pixels of x into patches; its row p has 1 where a patch reads pixel
        p.

        Its shape is (pixels of x, pixels of y * taps).
        """
        padded = [size + 2 * padding for size, padding in zip(self.x, self.padding, strict=True)]
        inside = tuple(
            slice(padding, padding + size) for size, padding in zip(self.x, self.padding, strict=True)
        )
        places = np.arange(math.prod(padded)).reshape(padded)[inside].ravel()
        found: NDArray[np.float32] = (places[:, None] == self.pixels).astype(np.float32)
        return found
