"""Tensors that numpy's functions process by torch.

So optimisers written with numpy run on a GPU as they do on the processor.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray
from torch import Tensor

_NAMES = {np.add: "add", np.subtract: "sub", np.multiply: "mul", np.true_divide: "div", np.sqrt: "sqrt"}


class NumpyTensor(NDArrayOperatorsMixin):
    """A tensor.

    A function that writes to its first argument writes in place. Any other output becomes a new tensor.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __array_ufunc__(self, function: np.ufunc, method: str, *given: Any, out: tuple[Any, ...] = ()) -> Any:
        if method != "__call__" or function not in _NAMES or not isinstance(given[0], NumpyTensor):
            return NotImplemented
        first, others = given[0], [[one.tensor] if isinstance(one, NumpyTensor) else one for one in given[1:]]
        name, in_place = _NAMES[function], bool(out) and out[0] is first
        # `_foreach_div` divides by a number; a GPU's `div` multiplies by its rounded reciprocal
        found = getattr(torch, f"_foreach_{name}{'_' if in_place else ''}")([first.tensor], *others)
        if in_place:
            return first
        if not out:
            return NumpyTensor(found[0])
        out[0].tensor = found[0]
        return out[0]


class TensorStepCounts:
    """Step counts of entries on the GPU, see `StepCounts`.

    Args:
        levels: the different numbers, this step included.
        index: index into `levels` of each entry. None: all entries have the same number.
    """

    def __init__(self, levels: NDArray[np.float64], index: Tensor | None) -> None:
        self._levels, self._index = levels, index

    def each(self, value: Callable[[NDArray[np.float64]], NDArray[np.float64]], dtype: np.dtype[Any]) -> Any:
        """`value` of each entry's number of steps, see `StepCounts.each`."""
        values = value(self._levels)
        if self._index is None:
            return float(values[0])
        return NumpyTensor(torch.from_numpy(values.astype(dtype)).to(self._index.device)[self._index])
