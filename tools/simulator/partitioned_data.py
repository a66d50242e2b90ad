"""A run's data set, partitioned over simulated devices."""

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np

from fleetune.edge_agent.datasets.dataset import Dataset
from fleetune.edge_agent.training.device_data import (
    DeviceData,
    all_fit,
    check_fits,
    num_stratified,
    scaled,
    take,
)
from fleetune.protocols.model.spec import ModelSpec
from fleetune.protocols.settings.device import DataSection
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.tasks import task_of
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.wire.payloads import run_key
from fleetune.tools.simulator.caller_samples import NO_CALLER_SAMPLES, AssignedRows, CallerSamples
from fleetune.tools.simulator.marked_samples import Splits, splits_of
from fleetune.tools.simulator.partition import Rows


@dataclass(frozen=True)
class SampleCounts:
    """The number of a device's training, test and validation samples."""

    train: int
    validation: int
    test: int

    @classmethod
    def of(cls, data: DeviceData) -> Self:
        """Return the counts of these data."""
        return cls(data.size("train"), data.size("validation"), data.size("test"))


@dataclass(frozen=True)
class PartitionedData:
    """Each device's part of the run's data set.

    Attributes:
        dataset: all samples.
        assigned: rows that the caller assigned to each device; None if `section.partition` assigns them.
        section: [data].
        num_devices: number of devices in the fleet.
        seed: seed of the run.
        task: task of the run.
        held_out: fraction of the training samples that is reserved for validation.
    """

    dataset: Dataset
    assigned: tuple[AssignedRows, ...] | None
    section: DataSection
    num_devices: int
    seed: int
    task: Task
    held_out: float

    @classmethod
    def of_run(cls, settings: RunSettings, caller_samples: CallerSamples = NO_CALLER_SAMPLES) -> Self:
        """Return the data of a run.

        Raises:
            SettingError: the caller passed samples or rows when the run began, but passes none now.
            DataError: see `edge_agent.datasets.sources.load`.
        """
        dataset = caller_samples.samples(settings)
        caller_samples.check(settings)
        return cls(
            dataset,
            caller_samples.assigned,
            settings.data,
            settings.fleet.devices,
            settings.run.seed,
            task_of(settings.task),
            settings.adoption.validation_fraction(settings.data.validation_fraction),
        )

    @cached_property
    def _rows(self) -> Splits:
        key = run_key(self.seed).child("partition")
        return splits_of(self.dataset, self.section.partition, self.num_devices, key, self.assigned)

    def rows(self, index: int) -> Rows:
        """Return the rows of the data set that device `index` has, ascending."""
        return np.sort(np.concatenate(self._rows[index]))

    def device_data(self, index: int, spec: ModelSpec) -> DeviceData:
        """Return the samples of device `index`, in the model's shape.

        Raises:
            DataError, SettingError: the data do not fit the model, or cannot be partitioned.
        """
        train, test = self._rows[index]
        key = run_key(self.seed).child("validation", index)
        data = take(self.dataset, train, test, self.held_out, key)
        fitting = check_fits(data, spec, self.task)
        return scaled(fitting, self.section.mean, self.section.std, spec)

    def group(self, index: int) -> str:
        """Return the groups of the data that device `index` has; "" for other kinds of partition."""
        if self.dataset.group is None or self.section.partition.kind != "group":
            return ""
        return ", ".join(map(str, np.unique(self.dataset.group[self.rows(index)])))

    def counts(self, spec: ModelSpec) -> list[SampleCounts]:
        """Return the sample counts of each device; reads no samples if the rows suffice.

        Raises:
            DataError, SettingError: see `device_data`.
        """
        devices = range(self.num_devices)
        dataset, marked = self.dataset, self.dataset.validation is not None and not self.dataset.benchmark
        if marked or dataset.block is not None or not all_fit(dataset, spec, self.task):
            return [SampleCounts.of(self.device_data(index, spec)) for index in devices]
        self.device_data(0, spec)  # raises the error that concerns all devices
        found = []
        for num_train, num_test in map(self._rows.sizes, devices):
            held_out = num_stratified(num_train, self.held_out)
            found.append(SampleCounts(num_train - held_out, held_out, num_test))
        return found
