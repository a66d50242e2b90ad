"""A device's data that grow, in one run: the samples of a round, and what is told of them between rounds."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.stream import snapshot
from fleetune.edge_agent.stream.drift import REFERENCE, WINDOW, loss_drift
from fleetune.edge_agent.stream.sample_stream import Figures, SampleStream, TooFewSamples
from fleetune.edge_agent.stream.snapshot import Arrays
from fleetune.edge_agent.stream.values import Turn
from fleetune.edge_agent.stream.wanted import PARTS, Part, Wanted
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


def wanted(enrolment: Enrolment, test_fraction: float) -> Wanted:
    """What the run's model takes of a store of samples. Raises SettingError: see `Enrolment.learns`."""
    task, shape, num_outputs = enrolment.learns, enrolment.spec.input_shape, enrolment.spec.num_classes

    def accepts(label: NDArray[Any]) -> bool:
        try:
            task.checked(label[None], num_outputs, "")
        except DataError:
            return False
        return True

    return Wanted(
        lambda dtype, found: fits_input(found, shape, as_bytes=dtype == "|u1"),
        labels=task.label_form,
        accepts=accepts,
        test_fraction=test_fraction,
        validation_fraction=enrolment.validation_fraction,
    )


@dataclass
class GrowingData:
    """A stream as one run sees it.

    Attributes:
        stream: of the device.
        enrolment: of the run.
        test_fraction: of the samples, held out for testing.
    """

    stream: SampleStream
    enrolment: Enrolment
    test_fraction: float
    _known: tuple[int, Figures] | None = None
    _watch: tuple[LocalTrainer, Callable[[], FlatArray | None]] | None = None
    _round: LocalTrainer | None = None

    def watch_loss(self, trainer: LocalTrainer, served: Callable[[], FlatArray | None]) -> None:
        """From now on the loss of the served model is tested between rounds.

        Args:
            trainer: without samples.
            served: the weights of the model that the device serves; None: none of this run's model.
        """
        self._watch = trainer, served

    def note_round(self, trainer: LocalTrainer) -> None:
        """A round is worked on with this trainer, and its samples."""
        self._round = trainer

    def newest(self) -> DeviceData:
        """All samples as they are just now; from now on those that do not fit are refused.

        Raises:
            TooFewSamples: none to train on, or none to test on.
            DataError, SettingError: they do not fit the run.
            StoreError: they cannot be read.
        """
        self.stream.store.expect(self.wanted)
        parts, _ = self.stream.newest(self.wanted)
        if not self._trains(parts):
            raise TooFewSamples(f"{self.stream.source}: no samples yet that this task trains on")
        return self.fitted(parts)

    def of_round(self, key: TransferKey) -> DeviceData:
        """The samples of a round: the same for the same task, also after a crash.

        Raises:
            TrainingStopped: there is nothing to train on.
            StoreError: they cannot be read.
        """
        parts = self.stream.of_round(self.wanted, _turn(key))
        if not self._trains(parts):
            raise TrainingStopped(f"{self.stream.source}: no samples just now that this task trains on")
        return self.fitted(parts)

    def trained(self, key: TransferKey) -> None:
        """The reply to a round's task is kept: its samples are new no longer. Raises StoreError."""
        if key.final_evaluation:  # it trained a copy
            self._round = None
            return
        self.stream.store.trained(_turn(key), self._held_out_losses())

    def figures(self) -> Figures:
        """What there is just now; asked again it costs nothing where nothing came. Raises StoreError."""
        change = self.stream.store.change
        if self._known is None or self._known[0] != change:
            self._known = change, self.stream.figures(self.wanted)
        return self._known[1]

    def _held_out_losses(self) -> NDArray[np.float64]:
        """Of the served model, on the newest test samples of the round."""
        trainer, self._round = self._round, None
        served = None if self._watch is None else self._watch[1]()
        if trainer is None or served is None:
            return np.zeros(0)
        x, y = trainer.data.x_test[-REFERENCE:], trainer.data.y_test[-REFERENCE:]
        losses = replace(trainer, data=replace(trainer.data, x_test=x, y_test=y)).losses(served, "test")
        taken = self.enrolment.learns.trained_on(y)
        return losses if taken is None else losses[taken]

    def loss_is_due(self) -> bool:
        """Whether enough samples have come to test the loss of the served model on them."""
        if self._watch is None or not len(self.stream.store.reference_losses):
            return False
        return self._untested() >= WINDOW

    def _untested(self) -> int:
        tested = self.stream.store.drift.loss_tested
        return snapshot.tally(self.stream.store, self._all_wanted, tested)[1]

    def test_loss(self) -> None:
        """Hold the loss of the served model on samples that came since against its loss on held-out ones of
        before. None of both it was trained on.

        Raises:
            StoreError: the store cannot be read or written.
        """
        store, served = self.stream.store, None if self._watch is None else self._watch[1]()
        if self._watch is None or served is None or not self.loss_is_due():
            return
        change = store.change
        tested = store.drift.loss_tested
        parts, _ = snapshot.read(store, self._all_wanted, change, newer_than=tested, most=REFERENCE)
        figure = None
        if self._trains(parts):
            data = with_known_ids(self.fitted(parts), self._watch[0].backend.vocabulary)
            data = for_vocabulary(data, self._watch[0].backend.vocabulary)
            losses = replace(self._watch[0], data=data).losses(served, "train")
            figure = loss_drift(store.reference_losses, losses)
        store.put_loss_drift(figure, change)

    @property
    def _all_wanted(self) -> Wanted:
        """Every sample, whatever it is for, as one to train on."""
        return replace(self.wanted, test_fraction=0.0, validation_fraction=0.0)

    @property
    def wanted(self) -> Wanted:
        """What the run's model takes of the store."""
        return wanted(self.enrolment, self.test_fraction)

    def _trains(self, parts: dict[Part, Arrays]) -> bool:
        """Whether there is a training sample that the task does not leave out."""
        task, (_, labels) = self.enrolment.learns, parts["train"]
        taken = task.trained_on(task.checked(labels, self.enrolment.spec.num_classes, self.stream.source))
        return bool(len(labels) if taken is None else taken.any())

    def fitted(self, parts: dict[Part, Arrays]) -> DeviceData:
        """Samples as the run's model takes them. Raises DataError: they do not fit."""
        arrays: dict[str, Any] = {}
        for part, (x, y) in parts.items():
            arrays |= {f"x_{part}": x, f"y_{part}": y}
        enrolment, data = self.enrolment, DeviceData(**arrays, source=self.stream.source)
        fitted = check_fits(data, enrolment.spec, enrolment.learns)
        return scaled(fitted, enrolment.mean, enrolment.std, enrolment.spec)


def with_known_ids(data: DeviceData, vocabulary: int | None) -> DeviceData:
    """`data` without samples that hold token ids the model does not have: one of them stops no stream."""
    if vocabulary is None:
        return data
    left: dict[str, Any] = {}
    for part in PARTS:
        x: NDArray[Any] = data.part(part)[0]
        known = ((x >= 0) & (x < vocabulary) & (np.floor(x) == x)).reshape(len(x), -1).all(axis=1)
        if not known.all():
            unknown = int((~known).sum())
            log.warning("%d %s samples with ids the model does not have are left out", unknown, part)
            left |= {f"x_{part}": x[known], f"y_{part}": data.part(part)[1][known]}
    return replace(data, **left)


def _turn(key: TransferKey) -> Turn:
    return Turn(key.run, key.round, key.attempt)
