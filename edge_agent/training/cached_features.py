"""Activations below what trains, computed once a sample instead of in every step.

Where the lower part of a model is frozen and nothing random happens there, what it makes of a sample never
changes. A backend then offers its upper part, whose samples are these features (`Backend.upper_layers`),
and a device's data hands them out instead of its samples. They take memory, 4 bytes a number: too many are
not kept, and the whole model computes in every step, which comes to the same up to rounding.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import get_args

import numpy as np

from fleetune.edge_agent.training.backend import Backend, InputArray, LabelArray, UpperLayers
from fleetune.edge_agent.training.device_data import DeviceData, Rows
from fleetune.protocols.errors import TrainingStopped
from fleetune.protocols.method.trainer import Part
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.device import TrainingSection

log = logging.getLogger(__name__)

MOST_BYTES = 2**28  # where it is not known what the process may take
SHARE = 0.25  # of what it may still take, where that is known
_AT_ONCE = 32


@dataclass(frozen=True)
class CachedFeatures(DeviceData):
    """A device's samples, of which the model's upper part gets the features.

    Attributes:
        features: by part, shape (n, numbers).
    """

    features: dict[Part, FlatArray] = field(default_factory=dict)

    def batch(self, part: Part, rows: Rows) -> tuple[InputArray, LabelArray]:
        """Features, shape (len(rows), numbers), and labels: new arrays."""
        return np.take(self.features[part], rows, axis=0), self.part(part)[1][rows]

    def without_validation(self) -> "CachedFeatures":
        """As if none had been held out, features too; new arrays."""
        train, validation = self.features["train"], self.features["validation"]
        order = slice(None) if self.order is None else self.order
        joined: dict[Part, FlatArray] = {
            **self.features,
            "train": np.concatenate([train, validation[self.compared]])[order],
            "validation": validation[:0],
        }
        whole = super().without_validation()
        return CachedFeatures(
            **{one.name: getattr(whole, one.name) for one in fields(DeviceData)}, features=joined
        )


def upper_layers_of(backend: Backend, training: TrainingSection) -> UpperLayers | None:
    """The part of a model above its features; None: it has none, or samples are augmented, each time anew."""
    return None if training.augmentations else backend.upper_layers()


def fits(upper: UpperLayers, data: DeviceData, room: int | None) -> bool:
    """Whether the features of all samples may be kept.

    Args:
        upper: says how many numbers they are.
        data: in the model's shape.
        room: bytes that this process may still take; None: not known.
    """
    num_samples = sum(data.size(part) for part in get_args(Part))
    num_bytes, most = 4 * num_samples * upper.size, MOST_BYTES if room is None else int(SHARE * room)
    use = "are kept" if num_bytes <= most else f"are not, of {most / 1e6:.0f} MB that they may take"
    log.info("features of %d samples, %.1f MB, %s", num_samples, num_bytes / 1e6, use)
    return num_bytes <= most


def cache_features(
    upper: UpperLayers, data: DeviceData, stop: Callable[[], str | None] = lambda: None
) -> CachedFeatures:
    """A device's data with the features of all its samples.

    Args:
        upper: computes them.
        data: in the model's shape.
        stop: asked before every batch; a reason ends it.

    Raises:
        TrainingStopped: `stop` gave a reason.
        ModelError: the model cannot compute.
    """
    features: dict[Part, FlatArray] = {}
    for part in get_args(Part):
        features[part] = np.empty((data.size(part), upper.size), np.float32)
        for start in range(0, data.size(part), _AT_ONCE):
            if reason := stop():
                raise TrainingStopped(f"stopped while features were computed: {reason}")
            rows = np.arange(start, min(start + _AT_ONCE, data.size(part)))
            features[part][rows] = upper.features(data.batch(part, rows)[0])
    return CachedFeatures(
        **{one.name: getattr(data, one.name) for one in fields(DeviceData)}, features=features
    )
