"""The original files of UCI HAR (Human Activity Recognition Using Smartphones): sensor windows by person."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset, make_dataset
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import open_text_input

CHANNELS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
_PARTS = ("train", "test")


def load_har(source: str, path: Path) -> Dataset:
    """Windows as (n, 9, time steps), float32, channels in the order of `CHANNELS`; labels from 0; `group` is
    the person; the test files' samples are marked as test.

    Args:
        source: as the user wrote it, for messages.
        path: the unpacked folder, with `train` and `test` in it.

    Raises:
        DataError: a file is missing, damaged, or does not go with the others.
    """
    parts = [_part(source, path / part, part) for part in _PARTS]
    x, y, person = (np.concatenate(column) for column in zip(*parts, strict=True))
    test = np.repeat([False, True], [len(part[1]) for part in parts])
    return make_dataset(source, x, y - 1, group=person, test=test, benchmark=True)


def _part(
    source: str, folder: Path, part: str
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    signals = [_table(folder / "Inertial Signals" / f"{name}_{part}.txt") for name in CHANNELS]
    labels = _table(folder / f"y_{part}.txt").astype(np.int64)
    persons = _table(folder / f"subject_{part}.txt").astype(np.int64)
    windows, columns = {one.shape for one in signals}, {labels.shape, persons.shape}
    if len(windows) > 1 or columns != {(len(signals[0]), 1)}:
        shapes = ", ".join(map(str, sorted(windows | columns)))
        raise DataError(f"{source}: {folder}: tables of {shapes} do not go together; unpack it again")
    if labels.min() < 1:
        raise DataError(f"{source}: {folder}/y_{part}.txt: activities count from 1")
    return np.stack(signals, axis=1), labels[:, 0], persons[:, 0]


def _table(path: Path) -> NDArray[np.float32]:
    """Read a text file with rows of numbers."""
    try:
        with open_text_input(path) as file:
            return np.loadtxt(file, dtype=np.float32, ndmin=2)
    except ValueError as problem:
        raise DataError(f"{path}: cannot be read ({' '.join(str(problem).split())})") from None
