"""Imports the device part of the package onnxruntime-training without torch."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fleetune.protocols.errors import ModelError

_PARENT = "onnxruntime.training"
_FOR_TORCH = f"{_PARENT}.ortmodule"
MISSING = (
    "onnxruntime-training is not installed here; pip uninstall onnxruntime, then"
    " pip install --no-deps onnxruntime-training-cpu==1.19.2 (only for Python 3.11 and 3.12 on x86-64), or"
    " use --trainer onnx, which runs everywhere"
)


def training_api() -> Any:
    """Return the module `onnxruntime.training.api`.

    Raises:
        ModelError: onnxruntime-training is missing, or onnxruntime is installed in its place.
    """
    with without_torch():
        try:
            return import_module(f"{_PARENT}.api")
        except ImportError:
            raise ModelError(MISSING) from None


@contextmanager
def without_torch() -> Iterator[None]:
    """Let `onnxruntime` and `onnxruntime.training.api` be imported without torch.

    The parent package imports torch and onnx for other parts, and onnxruntime tries
    `onnxruntime.training.ortmodule`, which imports torch. So the parent is replaced by an empty module, and
    ortmodule by None, which makes its import fail. Both are removed afterwards.
    """
    place = find_spec("onnxruntime")
    if _PARENT in sys.modules or place is None:
        yield
        return
    parent = ModuleType(_PARENT)
    parent.__path__ = [f"{folder}/training" for folder in place.submodule_search_locations or ()]
    modules: dict[str, Any] = sys.modules  # an import of a module that is None fails
    modules |= {_PARENT: parent, _FOR_TORCH: None}
    try:
        yield
    finally:
        del modules[_PARENT], modules[_FOR_TORCH]
