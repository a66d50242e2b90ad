"""Rules for convolutions and their gradients, each in the form that ONNX Runtime computes fastest.

ONNX Runtime's Conv works image by image, which is fast for large images with few channels. With many
channels, the patches of all images become rows of one matrix. The forward pass and the weight gradient are
then products with that matrix. The choice depends on shapes only, so that a model always has the same graph.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.export.builder import Builder, NoForm, Value, product
from fleetune.coordinator.export.operators.data_movement import concat, cut, pad
from fleetune.coordinator.export.operators.matrix_products import matrix_product
from fleetune.coordinator.export.operators.reductions import total
from fleetune.coordinator.export.torch_trace import Open, Operation, Shape, Size

_MIN_CHANNELS = 16  # for patches in a matrix: below, its short runs cost more than the products gain
_MAX_PIXELS = 36  # of an image whose patches are picked by a product instead of by look-up
_MOST_GATHERED = 44  # pixels of an image whose gradient is gathered from its patches' by a product


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


def _convolution(
    build: Builder,
    out: Operation,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    x, weight, bias = build.whole(x), build.whole(weight), bias and build.whole(bias)
    if transposed:
        geometry = _geometry(out.shape, x.shape, weight.shape, stride, padding, dilation, groups)
        about = geometry.attributes | {"output_padding": tuple(output_padding)}
        return build.emit("ConvTranspose", (x, weight, bias) if bias else (x, weight), out.shape, **about)
    geometry = _geometry(x.shape, out.shape, weight.shape, stride, padding, dilation, groups)
    looked_up = math.prod(geometry.x) > _MAX_PIXELS
    if geometry.in_matrix and not (build.plain and looked_up):
        filters = _filters(build, weight)
        rows = product((geometry.samples, *geometry.y))
        shape = (rows, filters.shape[0])
        patches = _patches(build, geometry, x)
        found = matrix_product(build, patches, build.transpose(filters, (1, 0)), shape, bias)
        return _from_rows(build, found, out.shape)
    return build.emit("Conv", (x, weight, bias) if bias else (x, weight), out.shape, **geometry.attributes)


def _convolution_backward(
    build: Builder,
    out: Operation,
    gradient: Value,
    x: Value,
    weight: Value,
    bias_sizes: object,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Value | None, ...]:
    gradient, x, weight = build.whole(gradient), build.whole(x), build.whole(weight)
    large, small = (gradient, x) if transposed else (x, gradient)
    geometry = _geometry(large.shape, small.shape, weight.shape, stride, padding, dilation, groups)
    found: list[Value | None] = [None, None, None]
    if wanted[0] and transposed:
        found[0] = build.emit("Conv", (gradient, weight), x.shape, **geometry.attributes)
    elif wanted[0]:
        found[0] = _input_gradient(build, geometry, gradient, weight, x.shape)
    if wanted[1]:
        found[1] = _weight_gradient(build, geometry, large, small, weight.shape)
    if wanted[2]:
        axes = [axis for axis in range(len(gradient.shape)) if axis != 1]
        found[2] = total(build, gradient, axes, keep=False)
    return tuple(found)


def _geometry(
    x: Shape,
    y: Shape,
    weight: Shape,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Geometry:
    if len(x) != len(weight):
        raise NoForm("its input has no batch axis")
    (channels_x, *size_x), (channels_y, *size_y) = (_fixed(shape[1:]) for shape in (x, y))
    return Geometry(
        x[0],
        groups,
        tuple(size_x),
        tuple(size_y),
        tuple(_fixed(weight[2:])),
        tuple(stride),
        tuple(padding),
        tuple(dilation),
        (channels_x, channels_y),
    )


def _fixed(shape: Shape) -> list[int]:
    sizes = [size for size in shape if not isinstance(size, Open)]
    if len(sizes) < len(shape):
        raise NoForm("the batch axis of its input is not the first axis")
    return sizes


def _patches(build: Builder, geometry: Geometry, x: Value) -> Value:
    """Return one row for each output pixel with the input patch that it reads, channels innermost."""
    samples, channels = geometry.samples, geometry.channels[0]
    count = math.prod(geometry.y) * geometry.taps
    if math.prod(geometry.x) <= _MAX_PIXELS:
        pixels = _channels_last(build, x)
        choice = build.transpose(build.constant(geometry.choice), (1, 0))
        patches = build.emit("MatMul", (choice, pixels), (samples, count, channels))
    else:
        around = (0, 0, *geometry.padding)
        pixels = _channels_last(build, pad(build, x, around, around))
        places = build.constant(geometry.pixels)
        patches = build.emit("Gather", (pixels, places), (samples, count, channels), axis=1)
    return build.reshape(patches, (product((samples, *geometry.y)), geometry.taps * channels))


def _channels_last(build: Builder, x: Value) -> Value:
    """Return images as an array of shape (samples, pixels, channels)."""
    flat = build.reshape(x, (*x.shape[:2], product(x.shape[2:])))
    return build.transpose(flat, (0, 2, 1))


def _rows(build: Builder, y: Value) -> Value:
    """Return images as a matrix of shape (samples * pixels, channels)."""
    pixels = _channels_last(build, y)
    return build.reshape(pixels, (product(pixels.shape[:2]), y.shape[1]))


def _from_rows(build: Builder, rows: Value, shape: Shape) -> Value:
    pixels = build.reshape(rows, (shape[0], product(shape[2:]), shape[1]))
    return build.reshape(build.transpose(pixels, (0, 2, 1)), shape)


def _filters(build: Builder, weight: Value) -> Value:
    """Return the filters as a matrix with one filter a row, entries in the order of a patch."""
    outputs, channels, *kernel = weight.shape
    flat = build.reshape(weight, (outputs, channels, product(kernel)))
    return build.reshape(build.transpose(flat, (0, 2, 1)), (outputs, product((channels, *kernel))))


def _input_gradient(
    build: Builder, geometry: Geometry, gradient: Value, weight: Value, shape: Shape
) -> Value:
    if not geometry.in_matrix or math.prod(geometry.x) > min(geometry.channels[1], _MOST_GATHERED):
        about = geometry.attributes | {"output_padding": geometry.spare}
        return build.emit("ConvTranspose", (gradient, weight), shape, **about)
    rows, filters = _rows(build, gradient), _filters(build, weight)
    patches = matrix_product(build, rows, filters, (rows.shape[0], filters.shape[1]))
    count = math.prod(geometry.y) * geometry.taps
    taps = build.reshape(patches, (geometry.samples, count, geometry.channels[0]))
    pixels = (geometry.samples, math.prod(geometry.x), geometry.channels[0])
    found = build.emit("MatMul", (build.constant(geometry.choice), taps), pixels)
    return build.reshape(build.transpose(found, (0, 2, 1)), shape)


def _weight_gradient(build: Builder, geometry: Geometry, x: Value, y: Value, shape: Shape) -> Value:
    if not geometry.in_matrix:
        found = _product_of_runs if geometry.in_runs else _correlated
        return found(build, geometry, x, y, shape)
    rows, patches = _rows(build, y), _patches(build, geometry, x)
    outputs, channels = geometry.channels[1], geometry.channels[0]
    flat = matrix_product(build, build.transpose(rows, (1, 0)), patches, (outputs, patches.shape[1]))
    taps = build.reshape(flat, (outputs, geometry.taps, channels))
    return build.reshape(build.transpose(taps, (0, 2, 1)), shape)


def _product_of_runs(build: Builder, geometry: Geometry, x: Value, y: Value, shape: Shape) -> Value:
    """Return the weight gradient of a convolution along one axis, computed as one matrix product.

    The product is (channels of y) x (taps * channels of x); the inner axis runs over samples and positions.
    """
    samples, (channels, outputs), taps = geometry.samples, geometry.channels, geometry.taps
    (length,), (padding,), (dilation,) = geometry.y, geometry.padding, geometry.dilation
    padded = pad(build, x, (0, 0, padding), (0, 0, padding))
    runs = build.reshape(
        build.transpose(padded, (1, 0, 2)), (1, channels, samples, geometry.x[0] + 2 * padding)
    )
    starts = [tap * dilation for tap in range(taps)]
    parts = [cut(build, runs, 3, start, start + length) for start in starts]
    columns = product((samples, length))
    under_taps = concat(build, parts, 0, (taps, channels, samples, length))
    rows = build.reshape(under_taps, (taps * channels, columns))
    gradients = build.reshape(build.transpose(y, (1, 0, 2)), (outputs, columns))
    flat = matrix_product(build, gradients, build.transpose(rows, (1, 0)), (outputs, taps * channels))
    found = build.reshape(flat, (outputs, taps, channels))
    return build.reshape(build.transpose(found, (0, 2, 1)), shape)


def _correlated(build: Builder, geometry: Geometry, x: Value, y: Value, shape: Shape) -> Value:
    """Return the weight gradient, computed as a convolution of x with the gradient y as its kernel.

    Channels and samples change roles: the result sums over samples as a convolution sums over channels.
    """
    samples, groups = geometry.samples, geometry.groups
    outputs, fan_in, rank = geometry.channels[1], geometry.channels[0] // groups, len(geometry.x)
    if groups == 1:
        rows = build.transpose(x, [1, 0, *range(2, rank + 2)])
    else:
        split = build.reshape(x, (samples, groups, fan_in, *geometry.x))
        turned = build.transpose(split, [2, 1, 0, *range(3, rank + 3)])
        rows = build.reshape(turned, (fan_in, product((samples, groups)), *geometry.x))
    kernel = build.transpose(y, [1, 0, *range(2, rank + 2)])
    ends = [max(0, padding - spare) for padding, spare in zip(geometry.padding, geometry.spare, strict=True)]
    sizes = [
        (size + padding + end - (number - 1) * stride - 1) // dilation + 1
        for size, padding, end, number, stride, dilation in zip(
            geometry.x, geometry.padding, ends, geometry.y, geometry.stride, geometry.dilation, strict=True
        )
    ]
    found = build.emit(
        "Conv",
        (rows, kernel),
        (fan_in, outputs, *sizes),
        kernel_shape=geometry.y,
        strides=geometry.dilation,
        dilations=geometry.stride,
        pads=(*geometry.padding, *ends),
        group=groups,
    )
    for axis, taps in enumerate(geometry.kernel):
        found = cut(build, found, 2 + axis, 0, taps)
    return build.reshape(build.transpose(found, [1, 0, *range(2, rank + 2)]), shape)


RULES: dict[str, Callable[..., Any]] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
