"""The samples of each simulated device over time: some before the run, the others in daily deliveries."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.stream.snapshot import Arrays
from fleetune.protocols.errors import DataError, FleetuneError, SettingError
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.simulation import Arrivals, Change
from fleetune.protocols.user_code import as_line, user_module
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.simulator.partition import Rows
from fleetune.tools.simulator.partitioned_data import PartitionedData

Drifting = Callable[[NDArray[Any], NDArray[Any], int, int], tuple[Any, Any]]
"""A function that maps inputs, labels, the day and the device's number to changed inputs and labels."""


@dataclass(frozen=True)
class ArrivalSchedule:
    """The samples of each device, delivery by delivery; equal settings give equal schedules.

    Attributes:
        settings: settings of the run, with [data.arrivals], `fleet.days` and the model's number of classes.
        data: the run's partitioned data.
    """

    settings: RunSettings
    data: PartitionedData

    @property
    def arrivals(self) -> Arrivals:
        assert self.settings.data.arrivals is not None, "made for runs that have them"
        return self.settings.data.arrivals

    @property
    def days(self) -> float:
        assert self.settings.fleet.days is not None, "see `device_specs.check_ends`"
        return self.settings.fleet.days

    @property
    def num_deliveries(self) -> int:
        """Number of deliveries in the whole run."""
        return int(self.days * self.arrivals.times_a_day)

    def check(self) -> None:
        """Raise SettingError if a device has too few samples for its days, or the change is unknown."""
        dataset = self.data.dataset
        if not dataset.benchmark and (dataset.test is not None or dataset.validation is not None):
            raise SettingError(
                f"data.arrivals: {dataset.source} marks samples for testing; with arrivals each"
                " sample's own content decides its role"
            )
        for index in range(self.settings.fleet.devices):
            needed = self.arrivals.first + self._come(index, self.num_deliveries)
            there = len(self._order(index))
            if needed > there or there <= self.arrivals.first:
                raise SettingError(
                    f"data.arrivals: device {index} has {there} samples of {dataset.source}, and {needed} are"
                    f" to come in {self.days:g} days; lower first or per_day, or assign more to each"
                )
        _ = self._changed

    def at_first(self, index: int) -> Arrays:
        """Return a device's samples at the start of the run."""
        return self._taken(index, 0, self.arrivals.first, 1)

    def of_delivery(self, index: int, delivery: int) -> Arrays:
        """Return the samples of a delivery, counted from 0; may be empty."""
        begins = self.arrivals.first + self._come(index, delivery)
        ends = self.arrivals.first + self._come(index, delivery + 1)
        return self._taken(index, begins, ends, 1 + delivery // self.arrivals.times_a_day)

    def _come(self, index: int, deliveries: int) -> int:
        """Return the number of samples that have arrived after that many deliveries."""
        left = len(self._order(index)) - self.arrivals.first
        a_day = left / self.days if self.arrivals.per_day is None else self.arrivals.per_day
        return int(a_day * deliveries / self.arrivals.times_a_day + 1e-9)

    def _taken(self, index: int, begins: int, ends: int, day: int) -> Arrays:
        rows = self._order(index)[begins:ends]
        x, y = self.data.dataset.x[rows], self.data.dataset.y[rows]
        change = self.arrivals.change
        if change is None or day < change.day or index not in self._devices_changed:
            return x, y
        try:
            changed_x, changed_y = self._changed(x, y, day, index)
            return np.asarray(changed_x), np.asarray(changed_y)
        except FleetuneError:
            raise
        except Exception as problem:
            raise DataError(f"data.arrivals.change {change.kind}: {as_line(problem)}") from problem

    def _order(self, index: int) -> Rows:
        rows = self.data.rows(index)
        if self.data.dataset.block is not None:
            return rows
        key = run_key(self.settings.run.seed).child("arrivals", index)
        return rows[key.permutation(len(rows))]

    @cached_property
    def _devices_changed(self) -> frozenset[int]:
        assert self.arrivals.change is not None, "asked where there is one"
        devices, share = self.settings.fleet.devices, self.arrivals.change.share
        order = run_key(self.settings.run.seed).child("drift").permutation(devices)
        return frozenset(int(index) for index in order[: max(1, round(share * devices))])

    @cached_property
    def _changed(self) -> Drifting:
        change = self.arrivals.change
        if change is None:
            return lambda x, y, _day, _index: (x, y)
        num_classes, std = self.settings.model.num_classes or 1, self._std
        known: dict[str, Drifting] = {
            "rotate-classes": lambda x, y, _day, _index: (x, (y + 1) % num_classes),
            "invert": lambda x, y, _day, _index: (255 - x if x.dtype == np.uint8 else -x, y),
            "shift": lambda x, y, _day, _index: (_shifted(x, std), y),
        }
        return known[change.kind] if change.kind in known else _of_user(change, list(known))

    @property
    def _std(self) -> float:
        x = self.data.dataset.x
        return float(x[:: max(1, len(x) // 1000)].astype(np.float64).std())


def _shifted(x: NDArray[Any], by: float) -> NDArray[Any]:
    if x.dtype == np.uint8:
        return np.clip(x.astype(np.int64) + round(by), 0, 255).astype(np.uint8)
    return np.asarray(x + np.float32(by), np.float32)


def _of_user(change: Change, known: list[str]) -> Drifting:
    module, _, name = change.kind.partition(":")
    try:
        found: Drifting = getattr(user_module(module), name)
    except Exception as problem:  # noqa: BLE001 - a user's module may raise anything
        kinds = ", ".join(known)
        raise SettingError(
            f"data.arrivals.change.kind = {change.kind!r}: is none of {kinds}, nor package.module:function"
            f" ({as_line(problem)})"
        ) from None
    return found
