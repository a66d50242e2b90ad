"""The samples of a device in one run; a source returns the samples of each round, fixed or growing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fleetune.edge_agent.datasets.sources import load
from fleetune.edge_agent.run.device import DeviceSettings
from fleetune.edge_agent.stream.sample_stream import DataStatistics
from fleetune.edge_agent.training.device_data import (
    DeviceData,
    check_fits,
    for_vocabulary,
    scaled,
    split,
)
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment


class Samples(Protocol):
    """A device's samples, in the form that the run's model takes."""

    @property
    def grow(self) -> bool:
        """True if the samples change between rounds; then no sample stays in memory between rounds."""
        ...

    def newest(self) -> DeviceData:
        """Return all current samples.

        Raises:
            TooFewSamples: there is no sample to train on, or none to test on.
            DataError, SettingError: the samples do not fit the run.
            StoreError: the samples cannot be read.
        """
        ...

    def of_round(self, key: TransferKey) -> DeviceData:
        """Return the samples of a round. The same task gets the same samples, also after a crash.

        Raises:
            TrainingStopped: there is no sample to train on.
            StoreError: the samples cannot be read.
        """
        ...

    def as_trained(self, data: DeviceData, vocabulary: int | None) -> DeviceData:
        """Return samples with token ids as the model takes them.

        Raises DataError if the model lacks an id.
        """
        ...

    def watch_loss(self, trainer: LocalTrainer, deployed: Callable[[], FlatArray | None]) -> None:
        """Test the loss of the deployed model between rounds with `trainer`, which has no samples."""
        ...

    def note_round(self, trainer: LocalTrainer) -> None:
        """Record the trainer of a round, which holds the round's samples."""
        ...

    def trained(self, key: TransferKey) -> None:
        """Record that the reply to a round's task is stored. Raises StoreError."""
        ...

    def figures(self) -> DataStatistics | None:
        """Return sample counts and drift for the coordinator.

        The result is None if they never change. Raises StoreError.
        """
        ...

    def loss_is_due(self) -> bool:
        """True if enough new samples have arrived to test the deployed model's loss. Raises StoreError."""
        ...

    def test_loss(self) -> None:
        """Test the deployed model's loss on new samples, which takes long. Raises StoreError."""
        ...


@dataclass(frozen=True)
class FixedSamples:
    """Samples that are complete when a run is joined; see `Samples`.

    Attributes:
        settings: settings of the device, which name the source.
        enrolment: enrolment of the run.
    """

    settings: DeviceSettings
    enrolment: Enrolment

    @property
    def grow(self) -> bool:
        return False

    def newest(self) -> DeviceData:
        enrolment = self.enrolment
        data = split(
            load(self.settings.data, None), self.settings.test_fraction, enrolment.validation_fraction
        )
        fitted = check_fits(data, enrolment.spec, enrolment.learns)
        return scaled(fitted, enrolment.mean, enrolment.std, enrolment.spec)

    def of_round(self, key: TransferKey) -> DeviceData:  # noqa: ARG002 - all rounds have the same
        return self.newest()

    def as_trained(self, data: DeviceData, vocabulary: int | None) -> DeviceData:
        return for_vocabulary(data, vocabulary)

    def watch_loss(self, trainer: LocalTrainer, deployed: Callable[[], FlatArray | None]) -> None:
        """Do nothing: fixed samples need no loss test."""

    def note_round(self, trainer: LocalTrainer) -> None:
        """Do nothing: fixed samples do not depend on rounds."""

    def trained(self, key: TransferKey) -> None:
        """Do nothing: fixed samples are not marked as trained on."""

    def figures(self) -> None:
        return None

    def loss_is_due(self) -> bool:
        return False

    def test_loss(self) -> None:
        """Do nothing: the test is never due."""
