"""The fleet's images as an upright camera never saw them: turned by a quarter, and black for white."""

import numpy as np
from pretrain import data as upright


def data() -> dict[str, np.ndarray]:
    """As `pretrain.data`."""
    found = upright()
    return {**found, "x": 255 - np.rot90(found["x"], axes=(-2, -1))}
