"""Every metric of a run: the one table from which summary, live view, tables, pages, plots and CSV draw.

A new metric is one entry of `METRICS` (and a field of `RoundCost`, if devices measure it): with `EVERYWHERE`
it stands in every view and file. What views compose by hand they compose of named entries; the rest follows.
"""

from collections.abc import Collection
from typing import get_args

from fleetune.coordinator.metrics.metric import Metric, Place
from fleetune.coordinator.metrics.registry.of_adoption import ADOPTION_METRICS
from fleetune.coordinator.metrics.registry.of_devices import (
    AFTER,
    BEFORE,
    BYTES_DOWN,
    BYTES_UP,
    DOWNLOAD,
    DURATION,
    ENERGY,
    EXPECTED,
    MEMORY,
    PERSONAL,
    PROCESSOR,
    SAMPLES,
    SERVED,
    TRAINING,
    UPDATES,
    UPLOAD,
    VALIDATION,
)
from fleetune.coordinator.metrics.registry.of_runs import (
    AFTER_MEAN,
    AFTER_WEIGHTED,
    BEFORE_MEAN,
    BEFORE_WEIGHTED,
    BYTES_DOWN_DENSE,
    BYTES_DOWN_PAPER,
    BYTES_UP_DENSE,
    BYTES_UP_PAPER,
    PERSONAL_MEAN,
    PERSONAL_MEAN_ALL,
    PERSONAL_WEIGHTED,
    PERSONAL_WEIGHTED_ALL,
    PERSONAL_WORST,
    PERSONAL_WORST_DECILE,
    ROUNDS,
    SHARE_DOWN,
    SHARE_UP,
    TOOK_PART,
    VALIDATION_MEAN,
)

__all__ = [
    "AFTER",
    "AFTER_MEAN",
    "AFTER_WEIGHTED",
    "BEFORE",
    "BEFORE_MEAN",
    "BEFORE_WEIGHTED",
    "BYTES_DOWN",
    "BYTES_DOWN_DENSE",
    "BYTES_DOWN_PAPER",
    "BYTES_UP",
    "BYTES_UP_DENSE",
    "BYTES_UP_PAPER",
    "DOWNLOAD",
    "DURATION",
    "ENERGY",
    "EVERYWHERE",
    "EXPECTED",
    "MEMORY",
    "METRICS",
    "PERSONAL",
    "PERSONAL_MEAN",
    "PERSONAL_MEAN_ALL",
    "PERSONAL_WEIGHTED",
    "PERSONAL_WEIGHTED_ALL",
    "PERSONAL_WORST",
    "PERSONAL_WORST_DECILE",
    "PROCESSOR",
    "ROUNDS",
    "SAMPLES",
    "SERVED",
    "SHARE_DOWN",
    "SHARE_UP",
    "TOOK_PART",
    "TRAINING",
    "UPDATES",
    "UPLOAD",
    "VALIDATION",
    "VALIDATION_MEAN",
    "shown_at",
    "title_in_predictions",
]

EVERYWHERE: dict[Place, str] = dict.fromkeys(get_args(Place), "")

METRICS: tuple[Metric, ...] = (
    DURATION,
    DOWNLOAD,
    TRAINING,
    PROCESSOR,
    UPLOAD,
    BYTES_DOWN,
    BYTES_UP,
    MEMORY,
    ENERGY,
    EXPECTED,
    BEFORE,
    AFTER,
    PERSONAL,
    VALIDATION,
    SERVED,
    *ADOPTION_METRICS,
    SAMPLES,
    UPDATES,
    ROUNDS,
    TOOK_PART,
    PERSONAL_MEAN,
    PERSONAL_WEIGHTED,
    PERSONAL_MEAN_ALL,
    PERSONAL_WEIGHTED_ALL,
    VALIDATION_MEAN,
    PERSONAL_WORST_DECILE,
    PERSONAL_WORST,
    BEFORE_MEAN,
    BEFORE_WEIGHTED,
    AFTER_MEAN,
    AFTER_WEIGHTED,
    BYTES_UP_DENSE,
    BYTES_DOWN_DENSE,
    BYTES_UP_PAPER,
    BYTES_DOWN_PAPER,
    SHARE_UP,
    SHARE_DOWN,
)


def shown_at(place: Place, but: Collection[str] = ()) -> list[Metric]:
    """All metrics that are shown in a place, but for those of these names: they have their columns."""
    return [metric for metric in METRICS if place in metric.shown and metric.name not in but]


def title_in_predictions(name: str) -> str:
    """What a prediction's quantity is called; one of another release has its name only."""
    return next((one.head("predictions") for one in METRICS if one.name == name), name)
