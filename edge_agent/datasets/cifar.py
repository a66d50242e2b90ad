"""The original files of CIFAR-10 and CIFAR-100, in the Python version or the binary version.

The Python version is a pickle of a NumPy array. Our unpickler knows plain values and stand-ins for the three
NumPy names in such a file, and nothing else. So a file from elsewhere can run no code here. NumPy's own
unpickling is not safe enough: damaged dtype states crash the interpreter.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.datasets.dataset import Dataset, make_dataset
from fleetune.protocols.errors import DataError, FleetuneError
from fleetune.protocols.input_files import read_input

_IMAGE_BYTES = 3 * 32 * 32
MAX_FILE_BYTES = 2**28  # the largest original file has 156 MB
_TEN = ([f"data_batch_{i}" for i in range(1, 6)], ["test_batch"])
_HUNDRED = (["train"], ["test"])


def load_cifar(source: str, folder: Path) -> Dataset:
    """Load images as uint8, shape (n, 3, 32, 32). CIFAR-100 has its 100 fine labels.

    Samples of the test files are marked as test.

    Raises:
        DataError: a file is missing or damaged, or a pickle has more than NumPy arrays.
    """
    for suffix, (train, test) in [(s, names) for names in (_TEN, _HUNDRED) for s in ("", ".bin")]:
        files = [folder / f"{name}{suffix}" for name in (*train, *test)]
        if files[-1].is_file():
            parts = [_read_bin(path) if suffix else _read_pickle(path) for path in files]
            x, y = (np.concatenate(column) for column in zip(*parts, strict=True))
            num_test = len(parts[-1][1])
            return make_dataset(
                source,
                x.reshape(-1, 3, 32, 32),
                y,
                test=np.arange(len(y)) >= len(y) - num_test,
                benchmark=True,
            )
    raise DataError(
        f"{source}: {folder} has neither test_batch[.bin] (CIFAR-10) nor test[.bin] (CIFAR-100);"
        " unpack it there"
    )


def _read_bin(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Read rows of label and image; CIFAR-100 has a coarse label before the fine one."""
    data = np.frombuffer(read_input(path, MAX_FILE_BYTES), np.uint8)
    num_labels = 2 if path.stem in ("train", "test") else 1
    if not data.size or data.size % (num_labels + _IMAGE_BYTES):
        raise DataError(f"{path}: {data.size} bytes are not a whole number of images; copy it again")
    rows = data.reshape(-1, num_labels + _IMAGE_BYTES)
    return rows[:, num_labels:], rows[:, num_labels - 1]


def _read_pickle(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = _unpickle(path)
    if isinstance(content, dict):  # keys are bytes in files that Python 2 wrote
        images = content.get("data", content.get(b"data"))
        named = [content.get(key) for name in ("labels", "fine_labels") for key in (name, name.encode())]
        y = next((labels for labels in named if isinstance(labels, list)), [])
        if isinstance(images, _Array) and all(type(label) is int and 0 <= label < 100 for label in y):
            return images.rows(path, len(y)), np.asarray(y, np.int64)
    raise DataError(
        f"{path}: not a CIFAR batch: `data` or `labels` is missing or not valid; get the original again"
    )


def _unpickle(path: Path) -> Any:
    try:
        return _ArrayUnpickler(io.BytesIO(read_input(path, MAX_FILE_BYTES)), encoding="bytes").load()
    except FleetuneError:
        raise
    except Exception as problem:  # noqa: BLE001 - damaged pickles raise nearly anything
        reason = " ".join(str(problem).split())
        raise DataError(f"{path}: not a pickle of a CIFAR batch ({reason}); get the original again") from None


class _Array:
    """Replaces the NumPy functions that rebuild an array; stores their arguments without trusting them."""

    def __init__(self, *_: object) -> None:
        self._state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def rows(self, path: Path, count: int) -> NDArray[np.uint8]:
        """Return the image bytes, shape (count, 3072).

        Raises:
            DataError: there are more or fewer bytes.
        """
        match self._state:
            case (_, (n, width), _Dtype(code="u1" | b"u1"), fortran, bytes(data)):
                if (n, width) == (count, _IMAGE_BYTES) and len(data) == count * _IMAGE_BYTES:
                    return np.frombuffer(data, np.uint8).reshape((n, width), order="F" if fortran else "C")
        raise DataError(
            f"{path}: not a CIFAR batch: `data` is not {count} x {_IMAGE_BYTES} bytes; get the original again"
        )


class _Dtype:
    """Replaces `numpy.dtype`, of which only the type's code matters here."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and the other state, which does not apply to bytes."""


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _STAND_INS.get((module.replace("numpy._core", "numpy.core"), name))
        if known is None:
            raise pickle.UnpicklingError(f"it asks for {f'{module}.{name}'!r}, which is not allowed")
        return known


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
}
