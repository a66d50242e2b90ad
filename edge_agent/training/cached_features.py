"""Caches the features of frozen layers, so that each sample passes through these layers only once.

If the lower layers of a model are frozen and draw nothing at random, their output for a sample never changes.
A backend then provides its upper layers (`Backend.upper_layers`), whose samples are these features. They
take 4 bytes a number. If they do not fit into memory, the whole model computes in every step, with the same
results up to rounding.
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

MOST_BYTES = 2**28  # limit if the memory that the process may take is unknown
SHARE = 0.25  # share of the memory that the process may still take, if that is known
_AT_ONCE = 32


@dataclass(frozen=True)
class CachedFeatures(DeviceData):
    """A device's samples with their cached features.

    Attributes:
        features: for each part, the features of its samples, shape (n, numbers).
    """

    features: dict[Part, FlatArray] = field(default_factory=dict)

    def batch(self, part: Part, rows: Rows) -> tuple[InputArray, LabelArray]:
        """Features, shape (len(rows), numbers), and labels, in new arrays."""
        return np.take(self.features[part], rows, axis=0), self.part(part)[1][rows]

    def without_validation(self) -> "CachedFeatures":
        """Return the data with the validation samples added to training, features too, in new arrays."""
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
    """Return the layers above the cached features; None if there are none, or augmentation changes the
    samples.
    """
    return None if training.augmentations else backend.upper_layers()


def fits(upper: UpperLayers, data: DeviceData, room: int | None) -> bool:
    """True if the features of all samples may be kept in memory.

    Args:
        upper: the upper layers, with the number of features of a sample.
        data: samples in the model's shape.
        room: bytes that this process may still take; None if unknown.
    """
    num_samples = sum(data.size(part) for part in get_args(Part))
    num_bytes, most = 4 * num_samples * upper.size, MOST_BYTES if room is None else int(SHARE * room)
    use = "are kept" if num_bytes <= most else f"are not cached, as at most {most / 1e6:.0f} MB are allowed"
    log.info("features of %d samples, %.1f MB, %s", num_samples, num_bytes / 1e6, use)
    return num_bytes <= most


def cache_features(
    upper: UpperLayers, data: DeviceData, stop: Callable[[], str | None] = lambda: None
) -> CachedFeatures:
    """Return a device's data with the features of all its samples.

    Args:
        upper: computes the features.
        data: samples in the model's shape.
        stop: called before every batch; a reason ends the computation.

    Raises:
        TrainingStopped: `stop` returned a reason.
        ModelError: the model cannot process the samples.
    """
    features: dict[Part, FlatArray] = {}
    for part in get_args(Part):
        features[part] = np.empty((data.size(part), upper.size), np.float32)
        for start in range(0, data.size(part), _AT_ONCE):
            if reason := stop():
                raise TrainingStopped(f"stopped while computing features: {reason}")
            rows = np.arange(start, min(start + _AT_ONCE, data.size(part)))
            features[part][rows] = upper.features(data.batch(part, rows)[0])
    return CachedFeatures(
        **{one.name: getattr(data, one.name) for one in fields(DeviceData)}, features=features
    )
