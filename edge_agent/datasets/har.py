"""The original files of UCI HAR (Human Activity Recognition Using Smartphones): windows of sensor data by
person.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset, make_dataset
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import open_text_input

CHANNELS = tuple(f"{sensor}_{axis}" for sensor in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
_PARTS = ("train", "test")


def load_har(source: str, path: Path) -> Dataset:
    """Load windows as float32, shape (n, 9, time steps), with channels in the order of `CHANNELS`.

    Labels count from 0, `group` is the person, and samples of the test files are marked as test.

    Args:
        source: the source as the user wrote it, for messages.
        path: the unpacked folder, with the folders `train` and `test`.

    Raises:
        DataError: a file is missing or damaged, or does not match the others.
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
        raise DataError(
            f"{source}: {folder}: its tables have different numbers of rows ({shapes}); unpack it again"
        )
    if labels.min() < 1:
        raise DataError(
            f"{source}: {folder}/y_{part}.txt: an activity is below 1, but they count from 1; unpack it again"
        )
    return np.stack(signals, axis=1), labels[:, 0], persons[:, 0]


def _table(path: Path) -> NDArray[np.float32]:
    """Read a text file with rows of numbers."""
    try:
        with open_text_input(path) as file:
            return np.loadtxt(file, dtype=np.float32, ndmin=2)
    except ValueError as problem:
        raise DataError(
            f"{path}: not a table of numbers ({' '.join(str(problem).split())}); unpack it again"
        ) from None
