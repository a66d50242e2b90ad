"""Rules for average pooling, resizing, and padding with neighbouring values.

These operations are linear along the rows and along the columns of an image. So each is a product with two
matrices, which torch's own one-dimensional operator computes. Gradients use the transposed matrices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fleetune.coordinator.export.builder import Builder, NoForm, Value
from fleetune.coordinator.export.operators.elementwise import arithmetic
from fleetune.coordinator.export.torch_trace import Open, Operation, Shape

RowMap = Callable[[Tensor, int], Tensor]  # a row, shape (m, 1, size), of the axis with this number


def _apply_maps(build: Builder, x: Value, shape: Shape, row_map: RowMap, *, backward: bool) -> Value:
    """Apply a linear map, or its gradient, along each axis of the images.

    `row_map` applies the map to one row; its matrix comes from applying it to the unit vectors.
    """
    large, found = (shape if backward else x.shape), build.whole(x)
    for axis in range(2, len(shape)):
        size = large[axis]
        if isinstance(size, Open):
            raise NoForm("the batch axis of its input is not the first axis")
        matrix = row_map(torch.eye(size)[:, None, :], axis - 2)[:, 0].numpy()
        matrix = matrix.T if backward else matrix
        if np.array_equal(matrix, np.eye(len(matrix), matrix.shape[1])) and len(matrix) == matrix.shape[1]:
            continue
        result = (*found.shape[:axis], matrix.shape[1], *found.shape[axis + 1 :])
        if axis == len(shape) - 1:
            found = build.emit("MatMul", (found, build.constant(matrix)), result)
        else:
            found = build.emit("MatMul", (build.constant(matrix.T), found), result)
    return found


def _average(
    build: Builder,
    out: Operation,
    values: Value,
    _: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
    *,
    backward: bool,
) -> Value:
    stride = stride or kernel

    def row_map(row: Tensor, axis: int) -> Tensor:
        size, step, edge = (one[axis if len(one) > axis else 0] for one in (kernel, stride, padding))
        return functional.avg_pool1d(row, size, step, edge, ceil_mode, count_include_pad)

    if divisor is not None:
        if any(padding) or ceil_mode:
            raise NoForm("it has a divisor_override together with padding or ceil_mode")
        factor = kernel[0] * kernel[-1] / divisor
        values = arithmetic(build, "Mul", values, build.number(factor, "f4"), values.shape)
    return _apply_maps(build, values, out.shape, row_map, backward=backward)


def _average_pool(build: Builder, out: Operation, x: Value, *args: Any) -> Value:
    return _average(build, out, x, x, *args, backward=False)


def _adaptive(build: Builder, out: Operation, x: Value, *_: object, backward: bool) -> Value:
    sizes: Any = (x if backward else out).shape[2:]

    def row_map(row: Tensor, axis: int) -> Tensor:
        return functional.adaptive_avg_pool1d(row, sizes[axis])

    return _apply_maps(build, x, out.shape, row_map, backward=backward)


def _resize(
    build: Builder, out: Operation, x: Value, *args: Any, mode: str, backward: bool, **_: object
) -> Value:
    corners = None if mode == "nearest" else args[2 if backward else 1]
    sizes: Any = (x if backward else out).shape[2:]

    def row_map(row: Tensor, axis: int) -> Tensor:
        if mode == "bicubic":  # torch has it for images only
            image = functional.interpolate(
                row[:, :, None], (1, sizes[axis]), mode=mode, align_corners=corners
            )
            return image[:, :, 0]
        return functional.interpolate(row, sizes[axis], mode=mode, align_corners=corners)

    return _apply_maps(build, x, out.shape, row_map, backward=backward)


def _neighbour_pad(build: Builder, out: Operation, x: Value, *args: Any, mode: str, backward: bool) -> Value:
    counts = args[1] if backward else args[0]
    pairs = [counts[index : index + 2] for index in range(0, len(counts), 2)][::-1]

    def row_map(row: Tensor, axis: int) -> Tensor:
        return functional.pad(row, pairs[axis], mode=mode)

    return _apply_maps(build, x, out.shape, row_map, backward=backward)


def _both(name: str, rule: Callable[..., Any], **about: Any) -> dict[str, Callable[..., Any]]:
    """Return the rules of an operator and of its gradient, by operator name."""
    return {
        name: partial(rule, backward=False, **about),
        f"{name}_backward": partial(rule, backward=True, **about),
    }


RULES: dict[str, Callable[..., Any]] = {
    "avg_pool2d": _average_pool,
    "avg_pool2d_backward": partial(_average, backward=True),
    **_both("_adaptive_avg_pool2d", _adaptive),
    **_both("upsample_nearest1d", _resize, mode="nearest"),
    **_both("upsample_nearest2d", _resize, mode="nearest"),
    **_both("upsample_linear1d", _resize, mode="linear"),
    **_both("upsample_bilinear2d", _resize, mode="linear"),
    **_both("upsample_bicubic2d", _resize, mode="bicubic"),
    **{
        key: rule
        for dims in (1, 2)
        for kind, mode in (("reflection", "reflect"), ("replication", "replicate"))
        for key, rule in _both(f"{kind}_pad{dims}d", _neighbour_pad, mode=mode).items()
    },
}
