"""The original files of MNIST, Fashion-MNIST and EMNIST (IDX, plain or .gz)."""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset, make_dataset
from fleetune.protocols.errors import DataError
from fleetune.protocols.input_files import read_input

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MAX_AXES = 4
_TEST_NAMES = ("t10k", "test")  # EMNIST has test instead of t10k


def load_idx(source: str, path: Path) -> Dataset:
    """Load images as uint8, shape (n, 1, height, width). Samples of the test files are marked as test.

    Args:
        source: the source as the user wrote it, for messages.
        path: a folder with one set of files; or `folder/prefix` for files whose names begin with `prefix-`,
            such as `emnist-byclass`.

    Raises:
        DataError: a file is missing or damaged, or is not what its name says.
    """
    folder, prefix = (path, "") if path.is_dir() else (path.parent, f"{path.name}-")
    train = _pair(source, folder, prefix, ("train",))
    test = _pair(source, folder, prefix, _TEST_NAMES)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise DataError(
            f"{source}: training images are {train[0].shape[1:]}, test images {test[0].shape[1:]};"
            " they must be equal"
        )
    x, y = np.concatenate([train[0], test[0]]), np.concatenate([train[1], test[1]])
    return make_dataset(source, x[:, None], y, test=np.arange(len(y)) >= len(train[1]), benchmark=True)


def idx_files_exist(path: Path) -> bool:
    """True if there is a folder at `path`, or if it is `folder/prefix` of a set of IDX files."""
    return path.exists() or any(path.parent.glob(f"{path.name}-*idx*"))


def _pair(
    source: str, folder: Path, prefix: str, names: tuple[str, ...]
) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Read images and labels of the training or the test set."""
    images = read_idx(_find(source, folder, [f"{prefix}{name}-images" for name in names]))
    labels = read_idx(_find(source, folder, [f"{prefix}{name}-labels" for name in names]))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(
            f"{source}: {prefix}{names[0]}: images {images.shape} do not match labels"
            f" {labels.shape}; copy them again"
        )
    return images, labels


def _find(source: str, folder: Path, beginnings: list[str]) -> Path:
    found = [path for name in beginnings for path in sorted(folder.glob(f"{name}[-.]idx*"))]
    if not found:
        raise DataError(
            f"{source}: there is no file {' or '.join(beginnings)}-idx*-ubyte[.gz] in {folder}; copy it there"
        )
    return found[0]


def read_idx(path: Path) -> NDArray[np.generic]:
    """Read one IDX file.

    Raises:
        DataError: the file cannot be read, is not an IDX file, or is shorter or longer than its header
            states.
    """
    data = read_input(path, unpack=True)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _DTYPES or not 1 <= data[3] <= _MAX_AXES:
        raise DataError(f"{path}: this is not an IDX file")
    dtype, start = np.dtype(_DTYPES[data[2]]), 4 + 4 * data[3]
    shape = tuple(int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4))
    if start + math.prod(shape) * dtype.itemsize != len(data):
        raise DataError(
            f"{path}: its header says {shape}, but it holds {len(data) - start} bytes; copy it again"
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape)
