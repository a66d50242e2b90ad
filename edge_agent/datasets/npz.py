"""Named arrays of a .npz file or of a user's function."""

import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleetune.edge_agent.datasets.dataset import Dataset, as_array, make_dataset
from fleetune.edge_agent.datasets.npy_arrays import open_npz
from fleetune.protocols.errors import DataError
from fleetune.protocols.files import write_atomically

_PARTS = ("train", "validation", "test")
_WHOLE = {"x", "y", "group", "test", "validation", "block"}
_NAMED, _NAME = 8, 60  # most array names in a message, and their longest length
_X = {"x", *(f"x_{part}" for part in _PARTS)}
_SPLIT = {f"{axis}_{part}" for part in _PARTS for axis in "xy"}


def load_npz(source: str, path: Path) -> Dataset:
    """Load a .npz file with the arrays that `from_arrays` takes. Object arrays (pickles) are refused.

    Raises:
        DataError: the file is missing or damaged, or lacks these arrays.
    """
    try:
        with open_npz(path, _WHOLE | _SPLIT) as file:
            names = file.names
            arrays = {name: file.read(name) for name in file.headers}
        if _several_inputs(names):
            with open_npz(path, names) as file:
                arrays = {name: file.read(name) for name in file.headers}
    except DataError as problem:
        raise DataError(f"{source}: {problem}") from None
    return from_arrays(source, arrays, names)


def from_arrays(source: str, arrays: Mapping[str, ArrayLike], names: Sequence[str] = ()) -> Dataset:
    """Make a data set of named arrays.

    Either the names are `x`, `y` (unless there are no labels), and optionally `group`, `block` and the masks
    `test` and `validation`. Or they are `x_train`, `y_train`, optionally `x_validation`, `y_validation`, and
    `x_test`, `y_test`. For a model with several inputs, all other names stand in the place of `x`, with `y`.

    Args:
        source: the source as the user wrote it, for messages.
        arrays: arrays by name.
        names: names of all arrays of the source, for messages; empty: those of `arrays`.

    Raises:
        DataError: arrays are missing or do not fit together.
    """
    inputs = _several_inputs(arrays)
    if "x" in arrays or inputs:
        x, y = arrays.get("x", {name: arrays[name] for name in inputs}), arrays.get("y")
        group, test, validation = (arrays.get(name) for name in ("group", "test", "validation"))
        block = arrays.get("block")
        return make_dataset(source, x, y, group=group, test=test, validation=validation, block=block)
    parts = [part for part in _PARTS if f"x_{part}" in arrays]
    needed = [f"{axis}_{part}" for part in ("train", *parts) for axis in "xy"]
    missing = [name for name in needed if name not in arrays]
    if missing:
        held = [name[:_NAME] for name in (names or [*arrays])[:_NAMED]]
        raise DataError(
            f"{source}: the array {missing[0]} is missing; it holds {', '.join(held) or 'nothing'}; save the"
            " arrays as x and y, or as x_train, y_train, x_test and y_test (several inputs: each by its name,"
            " and y)"
        )
    return _joined(source, parts, {name: as_array(source, name, column) for name, column in arrays.items()})


def _several_inputs(names: Iterable[str]) -> set[str]:
    """Return the names of several inputs: at least two next to `y`, where no array is called x."""
    found = set(names)
    others = found - _WHOLE - _SPLIT
    return others if "y" in found and len(others) > 1 and not _X & found else set()


def _joined(source: str, parts: list[str], arrays: dict[str, Any]) -> Dataset:
    for part in parts:
        x, y, first = arrays[f"x_{part}"], arrays[f"y_{part}"], arrays["x_train"]
        if (
            x.shape[:1] != y.shape[:1]
            or y.shape[1:] != arrays["y_train"].shape[1:]
            or x.shape[1:] != first.shape[1:]
            or x.dtype != first.dtype
        ):
            raise DataError(
                f"{source}: x_{part} {x.shape} {x.dtype} does not match y_{part} {y.shape}"
                f" and x_train {first.shape} {first.dtype}"
            )
    of = np.repeat(parts, [len(arrays[f"y_{part}"]) for part in parts])
    x = np.concatenate([arrays[f"x_{part}"] for part in parts])
    y = np.concatenate([arrays[f"y_{part}"] for part in parts])
    return make_dataset(source, x, y, test=of == "test", validation=of == "validation")


def write_npz(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write arrays to a compressed .npz file. The file is replaced as a whole.

    Raises:
        StoreError: it cannot be written.
    """
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    write_atomically(path, content.getvalue(), mode=None)
