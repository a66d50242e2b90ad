"""Rules for convolutions and their gradients, each in the form that ONNX Runtime computes fastest.

ONNX Runtime's Conv works image by image, which is fast for large images with few channels. With many
channels, the patches of all images become rows of one matrix. The forward pass and the weight gradient are
then products with that matrix. The choice depends on shapes only, so that a model always has the same graph.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

from fleetune.coordinator.export.builder import Builder, NoForm, Value, product
from fleetune.coordinator.export.operators import depthwise
from fleetune.coordinator.export.operators.data_movement import concat, cut, pad
from fleetune.coordinator.export.operators.elementwise import arithmetic
from fleetune.coordinator.export.operators.geometry import Geometry
from fleetune.coordinator.export.operators.matrix_products import matrix_product
from fleetune.coordinator.export.operators.reductions import total
from fleetune.coordinator.export.torch_trace import Open, Operation, Shape

_MAX_PIXELS = 36  # of an image whose patches are picked by a product instead of by look-up
_MOST_GATHERED = 44  # pixels of an image whose gradient is gathered from its patches' by a product


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
    if geometry.in_channels and not build.plain:
        filters = build.reshape(weight, weight.shape[:2])
        column = bias and build.reshape(bias, (out.shape[1], 1))
        return _from_channels(build, filters, _by_channel(build, x), out.shape, column)
    if geometry.depthwise and not build.plain:
        found = depthwise.forward(build, geometry, x, weight, out.shape)
        if found is not None:
            return found if bias is None else _with_bias(build, found, bias)
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


def _with_bias(build: Builder, y: Value, bias: Value) -> Value:
    per_channel = build.reshape(bias, (y.shape[1], *[1] * (len(y.shape) - 2)))
    return arithmetic(build, "Add", y, per_channel, y.shape)


def _by_channel(build: Builder, images: Value) -> Value:
    """Return images as a matrix of shape (channels, samples * pixels)."""
    rows = build.channels_first(images)
    return build.reshape(rows, (rows.shape[0], product(rows.shape[1:])))


def _from_channels(
    build: Builder, filters: Value, pixels: Value, shape: Shape, bias: Value | None = None
) -> Value:
    """Return filters times pixels, a matrix with one row for each channel, as images."""
    found = matrix_product(build, filters, pixels, (filters.shape[0], pixels.shape[1]), bias)
    return build.samples_first(build.reshape(found, (shape[1], shape[0], *shape[2:])))


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
    if geometry.in_channels:
        filters = build.transpose(build.reshape(weight, weight.shape[:2]), (1, 0))
        return _from_channels(build, filters, _by_channel(build, gradient), shape)
    found = depthwise.input_gradient(build, geometry, gradient, weight, shape) if geometry.depthwise else None
    if found is not None:
        return found
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
    if geometry.in_channels:
        pixels = build.transpose(_by_channel(build, x), (1, 0))
        return build.reshape(matrix_product(build, _by_channel(build, y), pixels, shape[:2]), shape)
    found = depthwise.weight_gradient(build, geometry, x, y, shape) if geometry.depthwise else None
    if found is not None:
        return found
    if not geometry.in_matrix:
        form = _product_of_runs if geometry.in_runs else _correlated
        return form(build, geometry, x, y, shape)
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
