"""What a reply may claim and how far its numbers may be from everybody else's: one place for all methods.

No method is asked. An update's numbers are those of all its patches, arrays and single figures, wherever they
stand in it. Two sizes of its arrays are looked at: the **peak** (largest magnitude), which finds one entry of
1e30, and the **RMS**, which finds a whole model that is a thousand times too large. Each is held against the
larger of two: that of the shared model the round began with, which is there in a fleet of one and in round 1,
and the median of the other updates of the round. A part of a model, a mask's survivors and whole weights all
have about the sizes of the model that they are of. Floors keep a model that starts at 0 from making every
first update look large. Single figures, such as a loss, are held against the others' and 1.

How many times as large an update is as that is its **strain**: about 1 in honest runs (docs/security.md).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketNotFinite, PacketOutlying, PacketOverclaimed
from fleetune.protocols.method.choice import DeviceReport
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.wire.payloads import Measures, Reply

PEAK_FLOOR = 1.0
RMS_FLOOR = 0.1
FEW = 16  # updates: the median of so few is another one without one of them
TELLING_STRAIN = 5.0  # an update is told to have broken a round when it strained so much

Sizes = Mapping[str, float]


def numbers(value: object, name: str) -> Iterator[tuple[str, Any]]:
    """Every array of floats and every float in a state, task or update, each with its place in it."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind == "f":
            yield name, value
    elif isinstance(value, float):
        yield name, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from numbers(one, f"{name}[{key}]")
    elif isinstance(value, tuple | list):
        for place, one in enumerate(value):
            yield from numbers(one, f"{name}[{place}]")
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from numbers(getattr(value, part.name), f"{name}.{part.name}")


def not_finite(value: object, name: str, known: object = None) -> str | None:
    """The place of the first number that is NaN or infinite; None: there is none.

    Args:
        value: a state, task or update.
        name: of it.
        known: one whose arrays were looked at before; those that both hold are not looked at again.
    """
    seen = {id(array) for _, array in numbers(known, "") if isinstance(array, np.ndarray)}
    for place, found in numbers(value, name):
        if isinstance(found, float):
            if not math.isfinite(found):
                return place
        elif id(found) not in seen and not np.isfinite(found).all():
            return place
    return None


def check_claims(reply: Reply[Any], report: DeviceReport | None) -> None:
    """A reply may claim at most the samples that its device reported: they are its weight in averages.

    Raises:
        PacketOverclaimed: it claims more, in its measures or anywhere in its update.
    """
    if report is None:
        return
    for place, claimed in _claims(reply, "reply"):
        if claimed > report.num_samples:
            raise PacketOverclaimed(
                f"{place} is {claimed}, but the device reported {report.num_samples} training samples"
            )


def check_scores(measures: Measures, task: Task) -> None:
    """What a device says of how well its models do must be possible in the run's task.

    Raises:
        PacketOverclaimed: a figure is beyond what its score can be, or the task has no such score.
    """
    bounds = {one.name: one.bounds for one in task.scores}
    places = ("before", "after", "personal", "validation", "kept", "alone")
    found = [(place, task.score.name, getattr(measures, place)) for place in places]
    found += [(f"scores[{name}]", name, value) for name, value in (measures.scores or {}).items()]
    for place, name, value in found:
        if name not in bounds:
            raise PacketOverclaimed(f"{place}: {task.kind} has no such score")
        if value is None or value is UNSET:
            continue
        lowest, highest = bounds[name]
        if not lowest <= value <= highest:
            raise PacketOverclaimed(f"{place} is {value:g}, but {name} is {lowest:g} to {highest:g}")
    lowest, highest = bounds[task.score.name]
    if measures.gain is not UNSET and abs(measures.gain) > highest - lowest:
        raise PacketOverclaimed(
            f"gain is {measures.gain:g}, but {task.score.name} is {lowest:g} to {highest:g}"
        )


def _claims(value: object, name: str) -> Iterator[tuple[str, int]]:
    if not dataclasses.is_dataclass(value):
        return
    for part in dataclasses.fields(value):
        inner, place = getattr(value, part.name), f"{name}.{part.name}"
        if part.name == "num_samples":
            yield place, inner
        else:
            yield from _claims(inner, place)


def sizes_of(update: object) -> Sizes:
    """Peak and RMS of an update's arrays, and the magnitude of each single figure by its place.

    Raises:
        PacketNotFinite: a number is NaN or infinite.
    """
    peak, squares, count, figures = 0.0, 0.0, 0, dict[str, float]()
    for place, found in numbers(update, "update"):
        if isinstance(found, float):
            figures[place] = abs(found)
        elif found.size:
            top = float(max(found.max(), -found.min()))
            peak = max(peak, top)
            squares += _mean_square(found, top) * found.size
            count += found.size
    arrays = {"peak": peak, "RMS": math.sqrt(squares / count)} if count else {}
    sizes = {**arrays, **figures}
    wrong = next((place for place, size in sizes.items() if not math.isfinite(size)), None)
    if wrong is not None:
        raise PacketNotFinite(f"{wrong} of the update is not finite")
    return sizes


def _mean_square(values: NDArray[Any], top: float) -> float:
    """Of entries of at most `top`, which float32 may not be able to square."""
    flat = values.ravel()
    if top > 1e15:
        flat = flat.astype(np.float64)
    return float(np.dot(flat, flat)) / flat.size


@dataclass(frozen=True)
class Strain:
    """How many times as large as its measure an update is, in what it is worst in."""

    times: float
    what: str
    size: float
    measure: float


def strain_of(sizes: Sizes, model: Sizes, others: list[Sizes]) -> Strain:
    """Held against `model`, the sizes of the shared model, and `others`, those of the other updates."""
    worst = Strain(0.0, "", 0.0, 1.0)
    for what, size in sizes.items():
        floor = RMS_FLOOR if what == "RMS" else PEAK_FLOOR
        typical = median([other[what] for other in others if what in other] or [0.0])
        measure = max(floor, model.get(what, 0.0), typical)
        if size / measure > worst.times:
            worst = Strain(size / measure, what, size, measure)
    return worst


@dataclass
class Scrutiny:
    """Looks at the updates of a run's rounds.

    Attributes:
        limit: greatest strain; 0: any.
        shared: the shared model of the round that is open; asked once a round.
    """

    limit: float
    shared: Callable[[], FlatArray]
    _model: Sizes | None = field(default=None, init=False)

    def open(self) -> None:
        """A round opens: the shared model is another one."""
        self._model = None

    @property
    def model(self) -> Sizes:
        """The sizes of the open round's shared model."""
        if self._model is None:
            self._model = sizes_of(self.shared())
        return self._model

    def check(self, update: object, others: Callable[[], Iterator[object]]) -> None:
        """An update that arrives.

        Args:
            update: of one device.
            others: the updates that the round has from other devices. They are asked for only when this one
                is larger than the shared model allows.

        Raises:
            PacketNotFinite: a single figure is NaN or infinite.
            PacketOutlying: it is larger than the limit allows.
        """
        sizes = sizes_of(update)
        if not self.limit or strain_of(sizes, self.model, []).times <= self.limit:
            return
        strain = strain_of(sizes, self.model, [sizes_of(other) for other in others()])
        if strain.times > self.limit:
            raise PacketOutlying(
                f"its {strain.what} is {strain.size:.3g}, {strain.times:.3g} times that of the shared model "
                f"or of the other updates ({strain.measure:.3g}); round.max_strain = {self.limit:g}"
            )

    def strains(self, sizes: Mapping[DeviceId, Sizes]) -> dict[DeviceId, float]:
        """Of each update of a round, against the others; of many, against all, which is the same."""
        every = list(sizes.values())
        few = len(every) <= FEW
        return {
            device: strain_of(
                own, self.model, [one for one in every if one is not own] if few else every
            ).times
            for device, own in sizes.items()
        }


def telling(strains: Mapping[DeviceId, float], least: float = TELLING_STRAIN) -> tuple[DeviceId, ...]:
    """The device that has strained a round most, if it did so clearly; else nobody."""
    if not strains:
        return ()
    worst = max(strains, key=lambda device: strains[device])
    rest = [strain for device, strain in strains.items() if device != worst]
    clear = strains[worst] >= max(least, 3 * max(rest, default=0.0))
    return (worst,) if clear else ()
