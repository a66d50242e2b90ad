"""The samples of a device in one run: a source gives those of each round, whether they stay or grow."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fleetune.edge_agent.run.device import DeviceSettings
from fleetune.edge_agent.stream.sample_stream import DataStatistics
from fleetune.edge_agent.training.device_data import (
    DeviceData,
    check_fits,
    for_vocabulary,
    load,
    scaled,
    split,
)
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment


class Samples(Protocol):
    """A device's samples, as the run's model takes them."""

    @property
    def grow(self) -> bool:
        """Whether they change between rounds; then no sample stays in memory between rounds."""
        ...

    def newest(self) -> DeviceData:
        """All samples there are now.

        Raises:
            TooFewSamples: none to train on, or none to test on.
            DataError, SettingError: they do not fit the run.
            StoreError: they cannot be read.
        """
        ...

    def of_round(self, key: TransferKey) -> DeviceData:
        """The samples of a round: the same for the same task, also after a crash.

        Raises:
            TrainingStopped: there is nothing to train on.
            StoreError: they cannot be read.
        """
        ...

    def as_trained(self, data: DeviceData, vocabulary: int | None) -> DeviceData:
        """Samples as the model takes their token ids. Raises DataError: it does not have one of them."""
        ...

    def watch_loss(self, trainer: LocalTrainer, deployed: Callable[[], FlatArray | None]) -> None:
        """Test the loss of the deployed model between rounds, with this trainer, which has no samples."""
        ...

    def note_round(self, trainer: LocalTrainer) -> None:
        """Take note of the trainer of a round, which has its samples."""
        ...

    def trained(self, key: TransferKey) -> None:
        """Take note that the reply to a round's task is stored. Raises StoreError."""
        ...

    def figures(self) -> DataStatistics | None:
        """Counts and drift, for the coordinator; None: they never change. Raises StoreError."""
        ...

    def loss_is_due(self) -> bool:
        """Whether enough samples have come to test the deployed model's loss on them. Raises StoreError."""
        ...

    def test_loss(self) -> None:
        """Test it, which takes long. Raises StoreError."""
        ...


@dataclass(frozen=True)
class FixedSamples:
    """Samples that are all there when a run is joined. See `Samples`.

    Attributes:
        settings: of the device, which name the source.
        enrolment: of the run.
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
        """Samples that stay need no watching."""

    def note_round(self, trainer: LocalTrainer) -> None:
        """Nothing depends on it."""

    def trained(self, key: TransferKey) -> None:
        """Nothing depends on it."""

    def figures(self) -> None:
        return None

    def loss_is_due(self) -> bool:
        return False

    def test_loss(self) -> None:
        """Never due."""
