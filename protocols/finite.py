"""Checks for NaN and infinite numbers, so that they are reported where they arise and never stored or sent.

Local training checks its own loss and weights; these functions check what methods compute. On the coordinator
no step makes such numbers from finite updates. On a device such a step raises TrainingDiverged: the device
declines the round and stays unchanged.
"""

import dataclasses
import math

import numpy as np
from numpy.typing import ArrayLike

from fleetune.protocols.bounds import LARGEST_LOSS
from fleetune.protocols.errors import TrainingDiverged


def check_finite(values: ArrayLike, what: str) -> None:
    """Raise TrainingDiverged if some of `values` are NaN or infinite; `what` names the method and the
    step.
    """
    if not np.isfinite(values).all():
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
        return None if value.dtype.kind != "f" or np.isfinite(value).all() else name
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
