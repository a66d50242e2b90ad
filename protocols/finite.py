"""Checks for NaN and infinite numbers, so that they are reported where they arise and never stored or sent.

Local training checks its own loss and weights; these functions check what methods compute. On the coordinator
no step makes such numbers from finite updates. On a device such a step raises TrainingDiverged: the device
declines the round and stays unchanged.
"""

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleetune.protocols.bounds import LARGEST_LOSS
from fleetune.protocols.errors import TrainingDiverged

_CHUNK = 2**16


def all_finite(array: NDArray[Any]) -> bool:
    """True if no number is NaN or infinite. The check works in chunks, without a copy of the array."""
    if array.dtype.kind != "f":
        return True
    numbers = array.reshape(-1)
    return all(np.isfinite(numbers[start : start + _CHUNK]).all() for start in range(0, numbers.size, _CHUNK))


def check_finite(values: ArrayLike, what: str) -> None:
    """Raise TrainingDiverged if some of `values` are NaN or infinite; `what` names the method and the
    step.
    """
    if not all_finite(np.asarray(values)):
        raise TrainingDiverged(f"{what} is not finite: lower training.learning_rate")


def check_loss(loss: float, what: str) -> None:
    """Raise TrainingDiverged if the coordinator would reject this loss; `what` names the method and the
    loss.
    """
    if not 0 <= loss <= LARGEST_LOSS:
        raise TrainingDiverged(f"{what} is {loss:g}: lower training.learning_rate")


def not_finite(value: object, name: str) -> str | None:
    """Return the first NaN or infinite number in a state, task or update, as `name.field.field`.

    Else None.
    """
    if isinstance(value, np.ndarray):
        return None if all_finite(value) else name
    if isinstance(value, float):
        return None if math.isfinite(value) else name
    inner: list[tuple[str, object]] = []
    if isinstance(value, dict):
        inner = [(f"{name}[{key}]", one) for key, one in value.items()]
    elif isinstance(value, tuple | list):
        inner = [(f"{name}[{place}]", one) for place, one in enumerate(value)]
    elif dataclasses.is_dataclass(value):
        inner = [(f"{name}.{part.name}", getattr(value, part.name)) for part in dataclasses.fields(value)]
    return next((found for place, one in inner if (found := not_finite(one, place))), None)
