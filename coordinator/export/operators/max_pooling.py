"""Rules for maximum pooling and its gradient.

If windows do not overlap, the pixels are first sorted by their position in the window and then compared. In
ONNX Runtime this is several times faster than the indices of its MaxPool. Sorting by transposing axes, rows
first and columns second, is faster than SpaceToDepth and DepthToSpace.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fleetune.coordinator.export.builder import Builder, NoForm, Value, product
from fleetune.coordinator.export.operators.data_movement import concat, cut, pad
from fleetune.coordinator.export.operators.elementwise import apply, arithmetic
from fleetune.coordinator.export.torch_trace import Open, Operation, Shape

Sizes = Sequence[int]


def _max_pool(
    build: Builder,
    out: Operation,
    x: Value,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = (0,),
    dilation: Sizes = (1,),
    ceil_mode: bool = False,  # unused, because the shape of the result shows it
) -> tuple[Value, Value]:
    """Return the maxima of the windows, and their indices in the flattened images."""
    rank = len(out.shape) - 2
    kernel, padding, dilation = (_each(one, rank) for one in (kernel, padding, dilation))
    stride = _each(stride or kernel, rank)
    if not build.plain and _apart(x.shape, out.shape, kernel, stride, padding, dilation):
        pooled = build.reshape(_largest(build, _split(build, x, kernel)), out.shape)
        return pooled, build.number(0, "i8", out.shape)  # no operation uses the indices
    largest, places = build.emit_several(
        "MaxPool",
        (build.whole(x),),
        2,
        kernel_shape=tuple(kernel),
        strides=tuple(stride),
        pads=_pads(x.shape, out.shape, kernel, stride, padding, dilation),
        dilations=tuple(dilation),
    )
    return (
        build.known(Value(largest, "f4", out.shape, out.shape)),
        build.known(Value(places, "i8", out.shape, out.shape)),
    )


def _each(sizes: Sizes, rank: int) -> Sizes:
    """Return one size for each axis of the image."""
    return tuple(sizes) * rank if len(sizes) == 1 else tuple(sizes)


def _pads(
    x: Shape, y: Shape, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes
) -> tuple[int, ...]:
    """Return the padding before and after each axis that gives the result's size as torch rounds it."""
    ends = []
    for axis in range(len(kernel)):
        size, number = x[axis + 2], y[axis + 2]
        if isinstance(size, Open) or isinstance(number, Open):
            raise NoForm("its samples are not on the first axis")
        reach = (number - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1
        ends.append(max(0, reach - size - padding[axis]))
    return (*padding, *ends)


def _max_pool_backward(
    build: Builder,
    out: Operation,
    gradient: Value,
    x: Value,
    kernel: Sizes,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    ceil_mode: bool,
    places: Value,
) -> Value:
    """Return zeros in the shape of x, with each gradient added at the place of its window's maximum."""
    rank = len(out.shape) - 2
    kernel, padding, dilation = (_each(one, rank) for one in (kernel, padding, dilation))
    if not build.plain and _apart(
        x.shape, gradient.shape, kernel, _each(stride or kernel, rank), padding, dilation
    ):
        return _to_first(build, gradient, x, kernel)
    return _scattered(build, gradient, places, out.shape)


def _apart(x: Shape, y: Shape, kernel: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes) -> bool:
    """True if the windows touch without overlapping and without gaps."""
    if tuple(kernel) != tuple(stride) or any(padding) or set(dilation) != {1} or len(kernel) != 2:
        return False
    return y[2:] == _whole_windows(x, kernel)  # otherwise the last windows would go beyond the edge


def _split(build: Builder, x: Value, kernel: Sizes) -> Value:
    """Return the pixels sorted by their position in their window, shape (n, positions, windows)."""
    samples, channels, *_ = x.shape
    tall, wide = _whole_windows(x.shape, kernel)
    rows, columns = kernel
    x = build.whole(cut(build, cut(build, x, 2, 0, tall * rows), 3, 0, wide * columns))
    bands = product((channels, tall))
    lines = build.transpose(build.reshape(x, (samples, bands, rows, wide * columns)), (0, 2, 1, 3))
    windows = product((bands, wide))
    pixels = build.transpose(build.reshape(lines, (samples, rows, windows, columns)), (0, 1, 3, 2))
    return build.reshape(pixels, (samples, rows * columns, windows))


def _joined(build: Builder, x: Value, kernel: Sizes, shape: Shape) -> Value:
    """Undo `_split`: return images from sorted pixels, with 0 beyond the last whole window."""
    samples, channels, height, width = shape
    tall, wide = _whole_windows(shape, kernel)
    rows, columns = kernel
    bands = product((channels, tall))
    pixels = build.reshape(x, (samples, rows, columns, product((bands, wide))))
    lines = build.reshape(build.transpose(pixels, (0, 1, 3, 2)), (samples, rows, bands, wide * columns))
    images = build.transpose(lines, (0, 2, 1, 3))
    inside = build.reshape(images, (samples, channels, tall * rows, wide * columns))
    spare = (height - tall * rows, width - wide * columns)  # type: ignore[operator]
    return pad(build, inside, (0, 0, 0, 0), (0, 0, *spare))


def _whole_windows(shape: Shape, kernel: Sizes) -> tuple[int, int]:
    """Return the number of whole windows along both axes."""
    height, width = shape[2:]
    if isinstance(height, Open) or isinstance(width, Open):
        raise NoForm("its samples are not on the first axis")
    return height // kernel[0], width // kernel[1]


def _largest(build: Builder, split: Value) -> Value:
    samples, _, windows = split.shape
    return build.emit("ReduceMax", (split,), (samples, 1, windows), axes=(1,), keepdims=1)


def _to_first(build: Builder, gradient: Value, x: Value, kernel: Sizes) -> Value:
    """Return the gradient of each window at its first pixel that equals the maximum, and 0 elsewhere."""
    split = _split(build, x, kernel)
    largest = _largest(build, split)
    one = largest.shape
    equal = apply(build, "Equal", [split, largest], split.shape, "?")
    names = build.emit_several("Split", (equal,), kernel[0] * kernel[1], axis=1)
    first, *others = (build.known(Value(name, "?", one, one)) for name in names)
    chosen, taken = [first], first
    for other in others[:-1]:
        free = apply(build, "Not", [taken], one, "?")
        chosen.append(apply(build, "And", [other, free], one, "?"))
        taken = apply(build, "Or", [taken, other], one, "?")
    chosen.append(apply(build, "Not", [taken], one, "?"))
    places = build.cast(concat(build, chosen, 1, split.shape), "f4")
    spread = arithmetic(build, "Mul", build.reshape(gradient, one), places, split.shape)
    return _joined(build, spread, kernel, x.shape)


def _adaptive_max_pool(build: Builder, out: Operation, x: Value, sizes: object) -> tuple[Value, Value]:
    kernel = _exact_windows(x.shape, out.shape)
    return _max_pool(build, out, x, kernel)


def _adaptive_max_pool_backward(
    build: Builder, out: Operation, gradient: Value, x: Value, places: Value
) -> Value:
    kernel = _exact_windows(x.shape, gradient.shape)
    return _max_pool_backward(build, out, gradient, x, kernel, kernel, (0,), (1,), False, places)


def _exact_windows(x: Shape, y: Shape) -> Sizes:
    """Return the window size of adaptive pooling. Raises NoForm if the windows differ in size."""
    kernel = []
    for size, number in zip(x[2:], y[2:], strict=True):
        if isinstance(size, Open) or isinstance(number, Open) or size % number:
            raise NoForm("its windows differ in size")
        kernel.append(size // number)
    return kernel


def _scattered(build: Builder, gradient: Value, places: Value, shape: Shape) -> Value:
    """Return an array of the given shape with each gradient added at its index in the flattened result."""
    size, count = product(shape), product(gradient.shape)
    zeros = build.emit("ConstantOfShape", (build.sizes((size,)),), (size,))
    flat = build.reshape(places, (count,))
    values = build.reshape(gradient, (count,))
    found = build.emit("ScatterElements", (zeros, flat, values), (size,), axis=0, reduction="add")
    return build.reshape(found, shape)


RULES: dict[str, Callable[..., Any]] = {
    "max_pool2d_with_indices": _max_pool,
    "max_pool3d_with_indices": _max_pool,
    "max_pool2d_with_indices_backward": _max_pool_backward,
    "max_pool3d_with_indices_backward": _max_pool_backward,
    "adaptive_max_pool2d": _adaptive_max_pool,
    "adaptive_max_pool2d_backward": _adaptive_max_pool_backward,
}
