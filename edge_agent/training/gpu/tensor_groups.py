"""Groups of tensors, one for each network, that numpy's functions process in one call of torch.

So optimisers written with numpy run on a GPU as they do on the processor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import NDArray
from torch import Tensor

_NAMES = {np.add: "add", np.subtract: "sub", np.multiply: "mul", np.true_divide: "div", np.sqrt: "sqrt"}


class TensorGroup(NDArrayOperatorsMixin):
    """One tensor of each network.

    A function that writes to its first argument writes in place. Any other output becomes new tensors.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = list(tensors)

    @property
    def size(self) -> int:
        """Number of networks."""
        return len(self.tensors)

    def __array_ufunc__(self, function: np.ufunc, method: str, *given: Any, out: tuple[Any, ...] = ()) -> Any:
        if method != "__call__" or function not in _NAMES or not isinstance(given[0], TensorGroup):
            return NotImplemented
        first, others = given[0], [one.tensors if isinstance(one, TensorGroup) else one for one in given[1:]]
        name, in_place = _NAMES[function], bool(out) and out[0] is first
        found = getattr(torch, f"_foreach_{name}{'_' if in_place else ''}")(first.tensors, *others)
        if in_place:
            return first
        if not out:
            return TensorGroup(found)
        out[0].tensors = list(found)
        return out[0]


class StepCountsGroup:
    """Step counts of the entries of each network, see `StepCounts`.

    Args:
        levels: for each network the different numbers, this step included.
        index: for each network the index into `levels` of each entry. None: all entries have the same.
    """

    def __init__(self, levels: Sequence[NDArray[np.float64]], index: Sequence[Tensor] | None) -> None:
        self._levels, self._index = levels, index

    def each(self, value: Callable[[NDArray[np.float64]], NDArray[np.float64]], dtype: np.dtype[Any]) -> Any:
        """`value` of each entry's number of steps, see `StepCounts.each`."""
        values = [value(levels) for levels in self._levels]
        if self._index is None:
            return [float(one[0]) for one in values]
        return TensorGroup(
            [
                torch.from_numpy(one.astype(dtype)).to(index.device)[index]
                for one, index in zip(values, self._index, strict=True)
            ]
        )
