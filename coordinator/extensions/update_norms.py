"""The norm of an update, compared with the shared model and with the other updates of the round.

No method is asked. An update's numbers are those of all its patches, arrays and single figures, wherever they
stand in it. Two sizes of its arrays count: the **peak** (largest magnitude), which finds one entry of 1e30,
and the **RMS**, which finds a whole model that is a thousand times too large. Each is divided by the larger
of two references:

- the size of the shared model that the round began with, which is there in a fleet of one and in round 1;
- the median of the other updates of the round.

A part of a model, the entries of a mask and whole weights all have about the size of the model that they
belong to. Floors keep a model that starts at 0 from making every first update look large. Single figures,
such as a loss, are compared with the others' and with 1.

The largest of these quotients is the update's **norm ratio**: about 1 in honest runs (docs/security.md).
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import PacketNotFinite
from fleetune.protocols.finite import all_finite
from fleetune.protocols.method.method import DeviceId, Method

PEAK_FLOOR = 1.0
RMS_FLOOR = 0.1
FEW = 16  # number of updates; a smaller sample's median depends too much on each of them
SUSPECT_RATIO = 5.0  # from this ratio on, an update is the likely reason that a round broke training

Sizes = Mapping[str, float]


def numbers(value: object, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every array of floats and every float in a state, task or update, each with its place in it."""
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
    """Return the place of the first number that is NaN or infinite; None if there is none.

    Args:
        value: a state, task or update.
        name: its name in the returned place.
        known: a value that was checked before; arrays that both share are not checked again.
    """
    seen = {id(array) for _, array in numbers(known, "") if isinstance(array, np.ndarray)}
    for place, found in numbers(value, name):
        if isinstance(found, float):
            if not math.isfinite(found):
                return place
        elif id(found) not in seen and not all_finite(found):
            return place
    return None


def sizes_of(update: object) -> Sizes:
    """Return peak and RMS of an update's arrays, and the magnitude of each single figure by its place.

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
    """Return the mean square of entries of at most `top`, scaled as float32 may not hold their squares."""
    flat = values.ravel()
    if top > 1e15:
        flat = flat.astype(np.float64)
    return float(np.dot(flat, flat)) / flat.size


@dataclass(frozen=True)
class NormRatio:
    """The size in which an update is largest relative to its reference, and that ratio."""

    times: float
    what: str
    size: float
    reference: float


def norm_ratio(sizes: Sizes, model: Sizes, others: list[Sizes]) -> NormRatio:
    """Return an update's ratio to `model`, the shared model's sizes, and `others`, other updates' sizes."""
    worst = NormRatio(0.0, "", 0.0, 1.0)
    for what, size in sizes.items():
        floor = RMS_FLOOR if what == "RMS" else PEAK_FLOOR
        typical = median([other[what] for other in others if what in other] or [0.0])
        reference = max(floor, model.get(what, 0.0), typical)
        if size / reference > worst.times:
            worst = NormRatio(size / reference, what, size, reference)
    return worst


class UpdateNorms:
    """Measures the updates of a run's rounds.

    Args:
        method: of the run, for its shared model.
        state_of: gives the method's state, as it was before the plan of the open round.
    """

    def __init__(self, method: Method[Any, Any, Any, Any], state_of: Callable[[], Any]) -> None:
        self._method, self._state_of = method, state_of
        self._measured: tuple[Any, Sizes] | None = None  # a state, and the sizes of its shared model

    @property
    def model(self) -> Sizes:
        """Return the sizes of the shared model, measured once for each state."""
        state = self._state_of()
        if self._measured is None or self._measured[0] is not state:
            self._measured = state, sizes_of(self._method.shared_model(state))
        return self._measured[1]

    def ratio(self, sizes: Sizes, others: list[Sizes]) -> NormRatio:
        """Return the norm ratio of one update, against the shared model and the sizes of other updates."""
        return norm_ratio(sizes, self.model, others)

    def ratios(self, sizes: Mapping[DeviceId, Sizes]) -> dict[DeviceId, float]:
        """Return the norm ratio of each update against the others of its round; of many, against all."""
        every = list(sizes.values())
        few = len(every) <= FEW
        return {
            device: norm_ratio(
                own, self.model, [one for one in every if one is not own] if few else every
            ).times
            for device, own in sizes.items()
        }


def suspect(ratios: Mapping[DeviceId, float], least: float = SUSPECT_RATIO) -> tuple[DeviceId, ...]:
    """Return the device with the largest norm ratio, if that is `least` or more and 3 times the next; else
    none.
    """
    if not ratios:
        return ()
    worst = max(ratios, key=lambda device: ratios[device])
    rest = [ratio for device, ratio in ratios.items() if device != worst]
    clear = ratios[worst] >= max(least, 3 * max(rest, default=0.0))
    return (worst,) if clear else ()
