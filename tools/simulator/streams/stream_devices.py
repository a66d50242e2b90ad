"""Simulated devices whose data grow: the agent's own store, snapshots and drift test, on the virtual clock.

The device's deployed model predicts each delivery before the device stores it. A round's samples are pinned
when its task is sent; an agent pins them when the task arrives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.extensions.adoption.deployed_model import read_deployed
from fleetune.edge_agent.run.growing_data import GrowingData, with_known_ids
from fleetune.edge_agent.stream.retention import RetentionLimits
from fleetune.edge_agent.stream.sample import BadSample, Sample, make_sample
from fleetune.edge_agent.stream.sample_requirements import Part
from fleetune.edge_agent.stream.sample_store import SampleStore
from fleetune.edge_agent.stream.sample_stream import (
    INTAKE,
    DataStatistics,
    SampleStream,
    StreamSettings,
    TooFewSamples,
)
from fleetune.edge_agent.stream.snapshot import Arrays
from fleetune.edge_agent.training.backend import Backend
from fleetune.edge_agent.training.device_data import DeviceData, for_vocabulary
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.errors import SettingError
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.settings.run_settings import RunSettings
from fleetune.protocols.settings.run_toml import convert
from fleetune.protocols.wire.payloads import Enrolment
from fleetune.tools.simulator import starting_models
from fleetune.tools.simulator.partitioned_data import PartitionedData
from fleetune.tools.simulator.streams.arrivals import ArrivalSchedule


@dataclass(frozen=True)
class ArrivalResult:
    """The result of a delivery.

    Attributes:
        figures: statistics of the device's data that it reports from now on.
        judged: predictions (see `Task.judged`) for the samples that the model can predict, shape (n, ...);
            None if the device has deployed no model of the run yet.
        labels: labels of the same samples.
    """

    figures: DataStatistics
    judged: NDArray[Any] | None = None
    labels: NDArray[Any] | None = None


@dataclass(frozen=True)
class StreamDevices:
    """The sample stores of simulated devices; each is open for one action at a time.

    Attributes:
        schedule: samples and times of the deliveries.
        enrolment: enrolment of the run.
        folder: folder of the devices' files.
        backend: computes predictions; None in a process that computes none.
        test_fraction: fraction of test samples; a sample's content decides whether it is a test sample.
    """

    schedule: ArrivalSchedule
    enrolment: Enrolment
    folder: Path
    backend: Backend | None = None
    test_fraction: float = field(default=0.3)

    def first_data(self, index: int) -> DeviceData:
        """Return a device's samples at the start of the run, before it has a store.

        Raises:
            SettingError: the device has no training sample, or no test sample.
        """
        with TemporaryDirectory() as folder:
            own = replace(self, folder=Path(folder), backend=None)
            own.begin("device", index, 0.0)
            with own.opened("device", 0.0) as growing:
                try:
                    return growing.newest()
                except TooFewSamples:
                    raise SettingError(
                        f"data.arrivals.first = {self.schedule.arrivals.first}: device {index} has no"
                        " training sample, or no test sample; raise it"
                    ) from None

    def begin(self, name: str, index: int, wall_s: float) -> DataStatistics:
        """Store a device's first samples; return the statistics that it reports."""
        with self.opened(name, wall_s) as growing:
            return self._keep(growing, *self.schedule.at_first(index))

    def deliver(self, name: str, index: int, delivery: int, wall_s: float) -> ArrivalResult:
        """Predict a delivery, store it, and test the deployed model's loss if a test is due.

        Args:
            name: name of the device.
            index: number of the device.
            delivery: number of the delivery, from 0.
            wall_s: the time of day, seconds since 1970.
        """
        with self.opened(name, wall_s) as growing:
            x, y = self.schedule.of_delivery(index, delivery)
            judged, labels = self._judged(name, growing, x, y)
            figures = self._keep(growing, x, y)
            if growing.loss_is_due():
                growing.test_loss()
                figures = growing.figures()
            return ArrivalResult(figures, judged, labels)

    @contextmanager
    def opened(self, name: str, wall_s: float) -> Iterator[GrowingData]:
        """Open a device's growing data in the form that the run needs, during this context."""
        bounds = convert(self.schedule.arrivals.keep, RetentionLimits, "data.arrivals.keep")
        path = self.folder / f"{name}.samples.sqlite"
        store = SampleStore.open(path, bounds, wall=lambda: wall_s, durable=False)
        growing = GrowingData(
            SampleStream(store, INTAKE, StreamSettings()), self.enrolment, self.test_fraction
        )
        store.require(growing.requirements)
        try:
            if self.backend is not None:
                bare = LocalTrainer(self.backend, _no_samples(growing), self.enrolment.training)
                growing.watch_loss(bare, partial(self._deployed, name))
            yield growing
        finally:
            growing.stream.close()

    def _keep(self, growing: GrowingData, x: NDArray[Any], y: NDArray[Any]) -> DataStatistics:
        store = growing.stream.store
        store.add(list(_samples(store, x, y)))
        return growing.figures()

    def _judged(
        self, name: str, growing: GrowingData, x: NDArray[Any], y: NDArray[Any]
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        deployed = self._deployed(name)
        fitting = [one for one in _samples(None, x, y) if growing.requirements.rejection(one) is None]
        if deployed is None or self.backend is None or not fitting:
            return None, None
        inputs = np.stack([one.x for one in fitting])
        labels = np.stack([_label(growing, one) for one in fitting])
        data = self.as_trained(growing.fitted(_as_training(inputs, labels)))
        if not data.size("train"):
            return None, None
        judge = LocalTrainer(self.backend, data, self.enrolment.training)
        return judge.judged(deployed, "train"), data.y_train

    def as_trained(self, data: DeviceData) -> DeviceData:
        """Return the data in the form for training: unknown token ids become ids that the model knows."""
        assert self.backend is not None, "asked by who trains"
        vocabulary = self.backend.vocabulary
        return for_vocabulary(with_known_ids(data, vocabulary), vocabulary)

    def _deployed(self, name: str) -> FlatArray | None:
        found = read_deployed(starting_models.deployed_file(self.folder, name).read())
        spec = self.enrolment.spec
        return None if found is None or found.record.model != spec.hash else found.weights


def _samples(store: SampleStore | None, x: NDArray[Any], y: NDArray[Any]) -> Iterator[Sample]:
    """Yield the valid samples; the store counts the invalid ones."""
    for one, label in zip(x, y, strict=True):
        try:
            yield make_sample(one, label if np.size(label) else None)
        except BadSample as problem:
            if store is not None:
                store.refuse(problem)


def _label(growing: GrowingData, sample: Sample) -> NDArray[Any]:
    """Return the label of a valid sample in the task's form; zeros if the task needs no label."""
    if sample.label is None:
        return np.zeros((), np.int64)
    found = growing.requirements.label(sample.label.class_number, sample.label.data)
    assert found is not None, "nothing was against it"
    return found


def _as_training(x: NDArray[Any], y: NDArray[Any]) -> dict[Part, Arrays]:
    return {"train": (x, y), "validation": (x[:0], y[:0]), "test": (x[:0], y[:0])}


def _no_samples(growing: GrowingData) -> DeviceData:
    spec = growing.enrolment.spec
    none = np.empty((0, *spec.input_shape), np.float32)
    labels = np.zeros((0, spec.num_classes), np.float32)
    y = labels if growing.requirements.labels == "numbers" else np.zeros(0, np.int64)
    return DeviceData(none, y, none, y, none, y)


def stream_devices(
    settings: RunSettings,
    enrolment: Enrolment,
    shares: PartitionedData,
    folder: Path,
    backend: Backend | None,
) -> StreamDevices | None:
    """Return the devices of a run with [data.arrivals]; None if the run has no such section."""
    if settings.data.arrivals is None:
        return None
    schedule = ArrivalSchedule(settings, shares)
    return StreamDevices(schedule, enrolment, folder, backend, settings.data.partition.test_fraction)
