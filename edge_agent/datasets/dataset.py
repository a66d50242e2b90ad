"""`Dataset`, the samples that every format and source gives, and the checks on them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleetune.protocols.bounds import MOST_IDS
from fleetune.protocols.errors import DataError

ArrayShapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Dataset:
    """All samples of a source.

    Attributes:
        x: inputs, uint8 or float32, shape (n, ...).
        y: labels. Classes: int64, shape (n,). Numbers: float32, shape (n, k), with k = 0 if there are no
            labels.
        group: person or place of each sample, shape (n,); None if unknown.
        test: True at the source's own test samples, shape (n,); None if it marks none.
        validation: True at the source's own validation samples, shape (n,); None if it marks none.
        source: the source as the user wrote it, for messages.
        benchmark: True if the test samples are those of a published benchmark. Simulations partition all its
            samples among devices, as the papers do. Samples that users mark in their own data stay as marked.
        arrays: name and shape in a sample of each array that a row of x consists of; empty: x is one array.
        block: block number of each sample, shape (n,). Samples of a block overlap, so they belong to the same
            part of the split. None: each sample is its own block.
        columns: names of the input columns of a table; empty: unknown.
    """

    x: NDArray[np.generic]
    y: NDArray[np.int64] | NDArray[np.float32]
    group: NDArray[np.generic] | None = None
    test: NDArray[np.bool_] | None = None
    validation: NDArray[np.bool_] | None = None
    source: str = "data"
    benchmark: bool = False
    block: NDArray[np.int64] | None = None
    arrays: ArrayShapes = ()
    columns: tuple[str, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return self.x.shape[1:]

    @property
    def strata(self) -> NDArray[np.int64]:
        """Stratum of each sample for partitions and splits, shape (n,): its class, or 0 if labels are
        numbers.
        """
        return self.y if self.y.ndim == 1 else np.zeros(len(self.y), np.int64)  # type: ignore[return-value]


def make_dataset(
    source: str,
    x: ArrayLike | Mapping[str, ArrayLike],
    y: ArrayLike | None,
    *,
    group: ArrayLike | None = None,
    test: ArrayLike | None = None,
    validation: ArrayLike | None = None,
    benchmark: bool = False,
    block: ArrayLike | None = None,
) -> Dataset:
    """Check samples and convert them to the types of a `Dataset`.

    `x` by name, for a model with several inputs, becomes rows (`rows_of`).
    Labels are classes if there is one whole number per sample, else numbers. `y = None` means no labels.
    Inputs stay uint8 or become float32, and are copied only if they must be converted.

    Raises:
        DataError: there are no samples, lengths differ, or a column has the wrong type.
    """
    arrays: ArrayShapes = ()
    if isinstance(x, Mapping):
        named = {name: as_array(source, name, x[name]) for name in sorted(x)}
        x, arrays = rows_of(source, named), tuple((name, one.shape[1:]) for name, one in named.items())
    inputs = _inputs(source, as_array(source, "x", x))
    labels = _labels(source, np.zeros((len(inputs), 0)) if y is None else as_array(source, "y", y))
    if len(labels) != len(inputs):
        raise DataError(
            f"{source}: y has shape {labels.shape} for {len(inputs)} samples in x; it needs a label for each"
        )
    columns = {
        name: None if column is None else as_array(source, name, column)
        for name, column in (("group", group), ("test", test), ("validation", validation), ("block", block))
    }
    for name, array in columns.items():
        if array is not None and array.shape != (len(inputs),):
            raise DataError(
                f"{source}: {name} has shape {array.shape}; it must be ({len(inputs)},), one value"
                " for each sample"
            )
    groups, blocks = columns["group"], columns["block"]
    if groups is not None:
        _check_groups(source, groups)
    tested, validated = (_mask(source, name, columns[name]) for name in ("test", "validation"))
    if tested is not None and validated is not None and (tested & validated).any():
        raise DataError(f"{source}: a sample is marked as test and as validation; mark it once")
    return Dataset(
        inputs,
        labels,
        groups,
        tested,
        validated,
        source,
        benchmark,
        None if blocks is None else blocks.astype(np.int64, copy=False),
        arrays,
    )


def rows_of(source: str, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Return samples of several arrays as rows, shape (n, numbers of a sample).

    `arrays` are in the order of their names, as in `protocols.model.interface`.
    Bytes with two or more axes in a sample are images, and are divided by 255. All other numbers stay.

    Raises:
        DataError: an array holds no numbers, or numbers that float32 rounds, or their lengths differ.
    """
    first = next(iter(arrays))
    for name, array in arrays.items():
        if array.dtype.kind not in "buif" or array.ndim < 1:
            raise DataError(f"{source}: {name} holds {array.dtype}; it must hold numbers for each sample")
        if len(array) != len(arrays[first]):
            raise DataError(
                f"{source}: {name} has {len(array)} samples, and {first} has {len(arrays[first])}; give each"
                " the same samples"
            )
        if array.dtype.kind in "ui" and array.size and np.abs(array.astype(np.int64)).max() > MOST_IDS:
            raise DataError(f"{source}: {name} has whole numbers above {MOST_IDS:,}, which float32 rounds")
    rows = [
        array.astype(np.float32) / (255 if array.dtype == np.uint8 and array.ndim > 2 else 1)
        for array in arrays.values()
    ]
    return np.concatenate([one.reshape(len(one), math.prod(one.shape[1:])) for one in rows], axis=1)


def as_array(source: str, name: str, column: ArrayLike) -> NDArray[Any]:
    """Convert a column to an array. Tensors of torch may need a gradient, lie on a GPU, or be bfloat16.

    Raises:
        DataError: its rows have different lengths, or are neither numbers nor texts.
    """
    try:
        if isinstance(column, (list, tuple)) and any(hasattr(row, "detach") for row in column):
            return np.stack([np.asarray(_off_torch(row)) for row in column])
        return np.asarray(_off_torch(column))
    except (ValueError, TypeError, RuntimeError) as problem:
        raise DataError(f"{source}: {name} is not an array: {' '.join(str(problem).split())}") from None


def _off_torch(column: Any) -> Any:
    """Return a tensor in a form that NumPy accepts, anything else unchanged; torch is not imported."""
    if not hasattr(column, "detach"):
        return column
    tensor = column.detach().cpu()
    return tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor


def _check_groups(source: str, group: NDArray[Any]) -> None:
    """Raise DataError if a sample has no group, or the groups' names have different types."""
    if group.dtype.kind not in "Of":  # other types have neither None nor NaN
        return
    missing = [row for row, name in enumerate(group) if name is None or name != name]  # noqa: PLR0124 - NaN
    if missing:
        raise DataError(
            f"{source}: group of sample {missing[0]} is {group[missing[0]]}, and {len(missing)} of"
            f" {len(group)} samples have none; name a group for each sample"
        )
    kinds = {type(name).__name__ for name in group} if group.dtype == np.object_ else set()
    if len(kinds) > 1:
        raise DataError(f"{source}: group mixes {' and '.join(sorted(kinds))}; give names of one type")


def _inputs(source: str, x: NDArray[Any]) -> NDArray[np.generic]:
    if x.ndim < 2 or not x.size:
        raise DataError(f"{source}: x has shape {x.shape}; it must be (samples, ...) and not empty")
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind not in "buif":
        raise DataError(f"{source}: x holds {x.dtype}; it must hold numbers")
    return x.astype(np.float32, copy=False)


def _labels(source: str, y: NDArray[Any]) -> NDArray[np.int64] | NDArray[np.float32]:
    if y.dtype.kind not in "buif":
        raise DataError(f"{source}: y holds {y.dtype}; labels must be numbers")
    if not y.ndim:
        raise DataError(f"{source}: y is a single number; it must have a label for each sample")
    if y.ndim == 1 and y.dtype.kind != "f":
        return y.astype(np.int64, copy=False)
    return (
        y.astype(np.float32, copy=False).reshape(len(y), -1) if y.size else np.zeros((len(y), 0), np.float32)
    )


def _mask(source: str, name: str, mask: NDArray[Any] | None) -> NDArray[np.bool_] | None:
    """Return a mask as booleans; None if it marks no sample."""
    if mask is None:
        return None
    if mask.dtype != np.bool_ and not np.isin(mask, (0, 1)).all():
        raise DataError(f"{source}: {name} must mark samples with True and False")
    return mask.astype(np.bool_) if mask.any() else None
