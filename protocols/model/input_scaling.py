"""Input normalisation of a run: a mean and a standard deviation, one number each or one per channel.

A channel is an index of a sample's first axis: samples of shape (3, 32, 32) have 3 channels.
"""

from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.bounds import Finite, Positive
from fleetune.protocols.errors import SettingError
from fleetune.protocols.model.spec import Shape

MAX_CHANNELS = 4096

Mean = Finite | Annotated[tuple[Finite, ...], Meta(min_length=1, max_length=MAX_CHANNELS)]
Std = Positive | Annotated[tuple[Positive, ...], Meta(min_length=1, max_length=MAX_CHANNELS)]


def as_floats(samples: NDArray[Any]) -> NDArray[np.float32]:
    """Return samples as float32, same shape; uint8 samples are divided by 255."""
    floats: NDArray[np.float32] = samples.astype(np.float32, copy=False)
    if samples.dtype == np.uint8:  # a copy, because callers change it in place
        floats /= np.float32(255)
    return floats


def over_channels(values: float | tuple[float, ...], input_shape: Shape) -> NDArray[np.float32]:
    """Return the values as float32 in a shape that broadcasts with samples: (), or (channels, 1, ...)."""
    array = np.asarray(values, np.float32)
    return array.reshape(-1, *[1] * (len(input_shape) - 1)) if array.ndim else array


def check_channels(mean: Mean, std: Std, input_shape: Shape) -> None:
    """Raise SettingError unless there is one number, or one for each of the model's channels."""
    for name, values in (("mean", mean), ("std", std)):
        if isinstance(values, tuple) and (not input_shape or len(values) != input_shape[0]):
            raise SettingError(
                f"data.{name} has {len(values)} numbers; the model's input {input_shape} has"
                f" {input_shape[0] if input_shape else 0} channels: give one for each, or one for all"
            )
