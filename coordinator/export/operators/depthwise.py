"""Depthwise convolutions as batched matrix products, which ONNX Runtime computes faster than its Conv.

ONNX Runtime's Conv calls one small product for each channel of each sample, and its gradients are slower
still. Here an image is divided into units of whole rows. A unit of the result is a sum over a few
neighbouring units of the input, each times a matrix that holds the channel's filter at every position. The
products run over channels, with the units of all samples as rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import numpy as np
from numpy.typing import NDArray

from fleetune.coordinator.export.builder import Builder, Value, product
from fleetune.coordinator.export.operators.data_movement import cut, pad
from fleetune.coordinator.export.operators.elementwise import arithmetic
from fleetune.coordinator.export.operators.geometry import Geometry
from fleetune.coordinator.export.operators.matrix_products import matrix_product
from fleetune.coordinator.export.operators.reductions import total
from fleetune.coordinator.export.torch_trace import Shape, Size

_LARGEST = 3 * 2**19  # bytes of the constants of one convolution
_LANES = 16  # numbers that a processor multiplies at once


@dataclass(frozen=True)
class Units:
    """A division of images into units of rows.

    Attributes:
        geometry: the sizes of the convolution.
        rows_x, rows_y: rows of a unit of the input and of the result.
        count: neighbouring units of the input that a unit of the result depends on.
        number: units of the result.
        before: rows of zeros above the input.
    """

    geometry: Geometry
    rows_x: int
    rows_y: int
    count: int
    number: int
    before: int

    @property
    def width_x(self) -> int:
        return math.prod(self.geometry.x[1:])

    @property
    def width_y(self) -> int:
        return math.prod(self.geometry.y[1:])

    @property
    def sizes(self) -> tuple[int, int]:
        """Entries of a unit of the input and of the result."""
        return self.rows_x * self.width_x, self.rows_y * self.width_y

    @property
    def num_bytes(self) -> int:
        """Bytes of the constants `choice`."""
        return 4 * self.count * math.prod(self.sizes) * self.geometry.taps

    @property
    def cost(self) -> float:
        """Time for each entry of the result, in passes over an array. Fitted to x86-64 with AVX-512."""
        inner, outer = self.sizes
        products = (inner + 8) * max(1, _LANES / outer) / _LANES
        if self.number == 1:
            return 1 + products + inner * self.geometry.taps / 256  # the last term makes the matrices
        read = math.prod(self.geometry.x) / math.prod(self.geometry.y)
        return self.count * (2 + read + products) * self.number * self.rows_y / self.geometry.y[0]

    @cached_property
    def choice(self) -> list[NDArray[np.float32]]:
        """For each neighbour, 0 and 1 that copy a filter's taps into its matrix, shape (taps, entries)."""
        geometry, (inner, outer) = self.geometry, self.sizes
        padding = self.geometry.padding[0] - self.before
        unit = replace(
            geometry,
            x=(self.count * self.rows_x, *geometry.x[1:]),
            y=(self.rows_y, *geometry.y[1:]),
            padding=(padding, *geometry.padding[1:]),
        )
        by_unit = unit.choice.reshape(self.count, inner * outer, geometry.taps)
        return [np.ascontiguousarray(one.T) for one in by_unit]


def forward(build: Builder, geometry: Geometry, x: Value, weight: Value, shape: Shape) -> Value | None:
    """Return the result of a depthwise convolution without bias; None if Conv is faster."""
    units = _chosen(geometry, _cost_of_conv(geometry))
    if units is None:
        return None
    parts = _units_of_input(build, units, x)
    sums = [_product(build, *pair) for pair in zip(parts, _matrices(build, units, weight), strict=True)]
    rows = _sum(build, sums)
    made = build.reshape(rows, (shape[1], shape[0], units.number * units.rows_y, *shape[3:]))
    return build.samples_first(_rows(build, made, 0, shape[2]))


def input_gradient(
    build: Builder, geometry: Geometry, gradient: Value, weight: Value, shape: Shape
) -> Value | None:
    """Return the gradient of the input; None if ConvTranspose is faster."""
    units = _chosen(geometry, _cost_of_conv(geometry))
    if units is None:
        return None
    more = units.count - 1
    number = units.number + more
    spare = units.number * units.rows_y - geometry.y[0]
    padded = _padded(build, build.channels_first(gradient), more * units.rows_y, more * units.rows_y + spare)
    sums = []
    for index, matrix in enumerate(_matrices(build, units, weight)):
        start = (more - index) * units.rows_y
        rows = _rows(build, padded, start, start + number * units.rows_y)
        turned = build.transpose(matrix, _last_two_swapped(matrix))
        sums.append(_product(build, _in_units(build, units, rows, number), turned))
    found = _sum(build, sums)
    if len(found.shape) == 4:  # several filters for each channel
        found = total(build, found, [1], keep=False)
    image = (shape[1], shape[0], number * units.rows_x, *shape[3:])
    rows = build.reshape(found, image)
    unread = max(0, units.before + geometry.x[0] - number * units.rows_x)
    rows = _padded(build, rows, 0, unread)
    return build.samples_first(_rows(build, rows, units.before, units.before + geometry.x[0]))


def weight_gradient(build: Builder, geometry: Geometry, x: Value, y: Value, shape: Shape) -> Value | None:
    """Return the gradient of the filters; None if another form is faster."""
    taps = geometry.taps
    units = _chosen(geometry, 8 + taps * (1 + 6 / geometry.kernel[-1]))
    if units is None:
        return None
    spare = units.number * units.rows_y - geometry.y[0]
    padded = _padded(build, build.channels_first(y), 0, spare)
    rows = _in_units(build, units, padded, units.number)
    sums = []
    for part, choice in zip(_units_of_input(build, units, x), units.choice, strict=True):
        matrix = _product(build, build.transpose(part, _last_two_swapped(part)), rows)
        flat = build.reshape(matrix, (geometry.channels[1], math.prod(units.sizes)))
        taken = build.transpose(build.constant(choice), (1, 0))
        sums.append(matrix_product(build, flat, taken, (geometry.channels[1], taps)))
    return build.reshape(_sum(build, sums), shape)


def _chosen(geometry: Geometry, most: float) -> Units | None:
    """Return the cheapest division; None if all cost more than `most`."""
    units = [one for one in _divisions(geometry) if one.cost < most and one.num_bytes <= _LARGEST]
    return min(units, key=lambda one: one.cost, default=None)


def _divisions(geometry: Geometry) -> list[Units]:
    height = geometry.y[0]
    whole = Units(geometry, geometry.x[0], height, 1, 1, 0)
    reach = (geometry.kernel[0] - 1) * geometry.dilation[0] + 1
    found = [whole]
    for rows in range(1, min(height, 33)):
        rows_x = rows * geometry.stride[0]
        count = -(-((rows - 1) * geometry.stride[0] + reach) // rows_x)
        found.append(Units(geometry, rows_x, rows, count, -(-height // rows), geometry.padding[0]))
    return found


def _cost_of_conv(geometry: Geometry) -> float:
    """Time of ONNX Runtime's Conv for each entry of its result, in the unit of `Units.cost`."""
    return geometry.taps * (0.7 + 10 / geometry.y[-1]) + 300 / math.prod(geometry.y) + 2


def _matrices(build: Builder, units: Units, weight: Value) -> list[Value]:
    """Return for each neighbour the matrices of all channels, shape (channels, [filters,] inner, outer)."""
    channels, outputs = units.geometry.channels
    filters = () if outputs == channels else (outputs // channels,)
    flat = build.reshape(weight, (outputs, units.geometry.taps))
    made = [
        build.emit("MatMul", (flat, build.constant(choice)), (outputs, choice.shape[1]))
        for choice in units.choice
    ]
    return [build.reshape(one, (channels, *filters, *units.sizes)) for one in made]


def _units_of_input(build: Builder, units: Units, x: Value) -> list[Value]:
    """Return for each neighbour the units of x as matrices, shape (channels, [1,] samples * units, inner)."""
    rows = (units.number + units.count - 1) * units.rows_x
    padded = _padded(build, build.channels_first(x), units.before, rows - units.geometry.x[0] - units.before)
    found = []
    for index in range(units.count):
        start = index * units.rows_x
        taken = _rows(build, padded, start, start + units.number * units.rows_x)
        found.append(_in_units(build, units, taken, units.number))
    return found


def _in_units(build: Builder, units: Units, images: Value, number: int) -> Value:
    """Return images of shape (channels or outputs, samples, rows, ...) as one row for each unit."""
    channels, outputs = units.geometry.channels
    several = () if outputs == channels else (images.shape[0] // channels,)  # type: ignore[operator]
    entries = math.prod(images.shape[2:]) // number  # type: ignore[arg-type]
    rows = product((images.shape[1], number))
    return build.reshape(images, (channels, *several, rows, entries))


def _product(build: Builder, a: Value, b: Value) -> Value:
    batch = a.shape[:-2] if a.shape[-3] != 1 else b.shape[:-2]
    return build.emit("MatMul", (a, b), (*batch, a.shape[-2], b.shape[-1]))


def _sum(build: Builder, parts: Sequence[Value]) -> Value:
    return reduce(lambda a, b: arithmetic(build, "Add", a, b, a.shape), parts)


def _padded(build: Builder, images: Value, before: int, after: int) -> Value:
    rest = [0] * (len(images.shape) - 3)
    return pad(build, images, [0, 0, before, *rest], [0, 0, after, *rest])


def _rows(build: Builder, images: Value, start: int, stop: Size) -> Value:
    return cut(build, images, 2, start, stop)


def _last_two_swapped(matrices: Value) -> list[int]:
    rank = len(matrices.shape)
    return [*range(rank - 2), rank - 1, rank - 2]
