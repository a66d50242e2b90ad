"""Samples of a device that collects data: those of each round, and drift figures between rounds."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.stream import snapshot
from fleetune.edge_agent.stream.drift import REFERENCE, WINDOW, loss_drift
from fleetune.edge_agent.stream.sample_requirements import PARTS, Part, SampleRequirements
from fleetune.edge_agent.stream.sample_stream import DataStatistics, SampleStream, TooFewSamples
from fleetune.edge_agent.stream.snapshot import Arrays
from fleetune.edge_agent.stream.store_values import TrainingRound
from fleetune.edge_agent.training.device_data import (
    DeviceData,
    check_fits,
    fits_input,
    for_vocabulary,
    scaled,
)
from fleetune.edge_agent.training.local_training import LocalTrainer
from fleetune.protocols.errors import DataError, TrainingStopped
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.wire.messages import TransferKey
from fleetune.protocols.wire.payloads import Enrolment

log = logging.getLogger(__name__)


def sample_requirements(enrolment: Enrolment, test_fraction: float) -> SampleRequirements:
    """Return the requirements for samples that the run's model can use. Raises SettingError."""
    task, shape, num_outputs = enrolment.learns, enrolment.spec.input_shape, enrolment.spec.num_classes

    def accepts(label: NDArray[Any]) -> bool:
        try:
            task.checked(label[None], num_outputs, "")
        except DataError:
            return False
        return True

    return SampleRequirements(
        lambda dtype, found: fits_input(found, shape, as_bytes=dtype == "|u1"),
        labels=task.label_form,
        accepts=accepts,
        test_fraction=test_fraction,
        validation_fraction=enrolment.validation_fraction,
    )


@dataclass
class GrowingData:
    """A sample stream as one run uses it; see `edge_agent.run.samples.Samples`.

    Attributes:
        stream: the device's sample stream.
        enrolment: enrolment of the run.
        test_fraction: fraction of the samples held out for testing.
    """

    stream: SampleStream
    enrolment: Enrolment
    test_fraction: float
    _known: tuple[int, DataStatistics] | None = None
    _watch: tuple[LocalTrainer, Callable[[], FlatArray | None]] | None = None
    _round: LocalTrainer | None = None

    @property
    def grow(self) -> bool:
        """True, because the samples change between rounds."""
        return True

    def as_trained(self, data: DeviceData, vocabulary: int | None) -> DeviceData:
        """Return token ids as the model takes them, without samples whose ids the model does not know."""
        return for_vocabulary(with_known_ids(data, vocabulary), vocabulary)

    def watch_loss(self, trainer: LocalTrainer, deployed: Callable[[], FlatArray | None]) -> None:
        """From now on, test the loss of the deployed model between rounds.

        Args:
            trainer: trainer without samples.
            deployed: returns the weights of the deployed model, or None if it has another structure.
        """
        self._watch = trainer, deployed

    def note_round(self, trainer: LocalTrainer) -> None:
        """Record the trainer of a round, which holds the round's samples."""
        self._round = trainer

    def newest(self) -> DeviceData:
        """Return all current samples; from now on the stream rejects samples that do not fit.

        Raises:
            TooFewSamples: there is no sample to train on, or none to test on.
            DataError, SettingError: the samples do not fit the run.
            StoreError: the samples cannot be read.
        """
        self.stream.store.require(self.requirements)
        parts, _ = self.stream.newest(self.requirements)
        if not self._trains(parts):
            raise TooFewSamples(f"{self.stream.source}: no samples yet that this task trains on")
        return self.fitted(parts)

    def of_round(self, key: TransferKey) -> DeviceData:
        """Return the samples of a round. The same task gets the same samples, also after a crash.

        Raises:
            TrainingStopped: there is no sample to train on.
            StoreError: the samples cannot be read.
        """
        parts = self.stream.round_samples(self.requirements, _training_round(key))
        if not self._trains(parts):
            raise TrainingStopped(f"{self.stream.source}: no samples at present that this task trains on")
        return self.fitted(parts)

    def trained(self, key: TransferKey) -> None:
        """Mark the samples of a round as trained on, once the reply is stored. Raises StoreError."""
        if key.final_evaluation:  # a final evaluation trains a copy
            self._round = None
            return
        self.stream.store.mark_trained(_training_round(key), self._held_out_losses())

    def figures(self) -> DataStatistics:
        """Return sample counts and drift, cached until the samples change. Raises StoreError."""
        change = self.stream.store.change
        if self._known is None or self._known[0] != change:
            self._known = change, self.stream.figures(self.requirements)
        return self._known[1]

    def _held_out_losses(self) -> NDArray[np.float64]:
        """Return the deployed model's losses on the newest test samples of the round, shape (n,)."""
        trainer, self._round = self._round, None
        deployed = None if self._watch is None else self._watch[1]()
        if trainer is None or deployed is None:
            return np.zeros(0)
        x, y = trainer.data.x_test[-REFERENCE:], trainer.data.y_test[-REFERENCE:]
        losses = replace(trainer, data=replace(trainer.data, x_test=x, y_test=y)).losses(deployed, "test")
        taken = self.enrolment.learns.trained_on(y)
        return losses if taken is None else losses[taken]

    def loss_is_due(self) -> bool:
        """True if enough new samples have arrived to test the deployed model's loss on them."""
        if self._watch is None or not len(self.stream.store.reference_losses):
            return False
        return self._untested() >= WINDOW

    def _untested(self) -> int:
        tested = self.stream.store.drift.loss_tested
        return snapshot.count_training_samples(self.stream.store, self._requirements_for_loss, tested)[1]

    def test_loss(self) -> None:
        """Compare the deployed model's loss on newly arrived samples with its loss on earlier held-out ones.

        The model was trained on neither.

        Raises:
            StoreError: the store cannot be read or written.
        """
        store, deployed = self.stream.store, None if self._watch is None else self._watch[1]()
        if self._watch is None or deployed is None or not self.loss_is_due():
            return
        change = store.change
        tested = store.drift.loss_tested
        parts, _ = snapshot.read(
            store, self._requirements_for_loss, change, newer_than=tested, max_samples=REFERENCE
        )
        figure = None
        if self._trains(parts):
            data = self.as_trained(self.fitted(parts), self._watch[0].backend.vocabulary)
            losses = replace(self._watch[0], data=data).losses(deployed, "train")
            figure = loss_drift(store.reference_losses, losses)
        store.save_loss_drift(figure, change)

    @property
    def _requirements_for_loss(self) -> SampleRequirements:
        """Return requirements that select all samples as training samples, whatever their role."""
        return replace(self.requirements, test_fraction=0.0, validation_fraction=0.0)

    @property
    def requirements(self) -> SampleRequirements:
        """Requirements for samples that the run's model can use."""
        return sample_requirements(self.enrolment, self.test_fraction)

    def _trains(self, parts: dict[Part, Arrays]) -> bool:
        """True if there is a sample that the task trains on."""
        task, (_, labels) = self.enrolment.learns, parts["train"]
        taken = task.trained_on(task.checked(labels, self.enrolment.spec.num_classes, self.stream.source))
        return bool(len(labels) if taken is None else taken.any())

    def fitted(self, parts: dict[Part, Arrays]) -> DeviceData:
        """Return samples in the form that the run's model takes. Raises DataError if they do not fit."""
        arrays: dict[str, Any] = {}
        for part, (x, y) in parts.items():
            arrays |= {f"x_{part}": x, f"y_{part}": y}
        enrolment, data = self.enrolment, DeviceData(**arrays, source=self.stream.source)
        fitted = check_fits(data, enrolment.spec, enrolment.learns)
        return scaled(fitted, enrolment.mean, enrolment.std, enrolment.spec)


def with_known_ids(data: DeviceData, vocabulary: int | None) -> DeviceData:
    """Return a copy of `data` without samples that hold token ids unknown to the model."""
    if vocabulary is None:
        return data
    left: dict[str, Any] = {}
    for part in PARTS:
        x: NDArray[Any] = data.part(part)[0]
        known = ((x >= 0) & (x < vocabulary) & (np.floor(x) == x)).reshape(len(x), -1).all(axis=1)
        if not known.all():
            unknown = int((~known).sum())
            log.warning(
                "%d %s samples have token ids that the model does not know; they are left out",
                unknown,
                part,
            )
            left |= {f"x_{part}": x[known], f"y_{part}": data.part(part)[1][known]}
    return replace(data, **left)


def _training_round(key: TransferKey) -> TrainingRound:
    return TrainingRound(key.run, key.round, key.attempt)
