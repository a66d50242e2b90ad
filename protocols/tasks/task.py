"""Base class of tasks: their labels, losses and scores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.errors import DataError, SettingError
from fleetune.protocols.settings.task import TaskKind, TaskSection
from fleetune.protocols.tasks.losses import QUANTILE, sample_losses
from fleetune.protocols.tasks.scores import Score

Array = NDArray[Any]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Task(ABC):
    """A kind of learning task. To add one, write a subclass in a file of its own and add a line to
    `protocols.tasks`.

    A sample's label is a class number, a vector of numbers, or an optional class number; a missing one is
    stored as 0.

    Attributes:
        section: the run's [task].

    Raises:
        SettingError: the section names a loss or a score that the task does not have.
    """

    section: TaskSection
    kind: ClassVar[TaskKind]
    losses: ClassVar[tuple[str, ...]]
    scores: ClassVar[tuple[Score, ...]]
    weighs_classes: ClassVar[bool] = False
    by_reference: ClassVar[frozenset[str]] = frozenset()  # scores that also need errors of normal samples
    label_form: ClassVar[Literal["classes", "numbers", "optional"]] = "numbers"
    targets_are_samples: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.loss not in self.losses and ":" not in self.loss:
            allowed = ", ".join(self.losses)
            raise SettingError(
                f"task.loss: {self.kind} has no {self.loss!r}; choose {allowed}, or package.module:function"
            )
        names = [one.name for one in self.scores]
        if self.section.score not in ("", *names):
            raise SettingError(
                f"task.score: {self.kind} has no {self.section.score!r}; choose {', '.join(names)}"
            )
        if self.section.class_weights and not self.weighs_classes:
            raise SettingError(f"task.class_weights: {self.kind} has no classes; remove the key")

    @property
    def loss(self) -> str:
        """The loss's name, or the user's function."""
        return self.section.loss or self.losses[0]

    @property
    def users_loss(self) -> bool:
        """True if the loss is a user's function, which only torch and graphs made from it can compute."""
        return ":" in self.loss

    @property
    def score(self) -> Score:
        """The score that the fleet is compared by."""
        wanted = self.section.score or self.scores[0].name
        return next(one for one in self.scores if one.name == wanted)

    @abstractmethod
    def num_outputs(self, input_shape: tuple[int, ...], labels: Array) -> int:
        """Number of outputs of a model per sample, as far as these labels show."""

    @abstractmethod
    def checked(self, labels: Array, num_outputs: int, where: str) -> Array:
        """Labels in the form that the task uses, shape (n, ...).

        Args:
            labels: labels from the source.
            num_outputs: number of outputs of the model.
            where: the source, for messages.

        Raises:
            DataError: they do not fit this task or the model.
        """

    def trained_on(self, _: Array) -> NDArray[np.bool_] | None:
        """Which samples may be used for training, by their labels, shape (n,); None for all."""
        return None

    def targets(self, inputs: Array, labels: Array) -> Array:  # noqa: ARG002
        """Return the targets of a batch's outputs.

        Args:
            inputs: the batch as the model sees it, shape (n, ...).
            labels: labels from `checked`.
        """
        return labels

    def target_shape(self, num_outputs: int, input_shape: tuple[int, ...]) -> tuple[int, ...]:  # noqa: ARG002
        """Return the shape of one sample's target; () are int64 classes, all others float32."""
        return (num_outputs // len(self.section.quantiles) if self.loss == QUANTILE else num_outputs,)

    def sample_losses(self, outputs: Floats, targets: Array) -> NDArray[np.float64]:
        """Return each sample's loss by numpy, shape (n,); not for a user's loss."""
        return sample_losses(self.loss, self.section, outputs, targets)

    def judged(self, outputs: Floats, targets: Array) -> Array:  # noqa: ARG002
        """Return the part of a batch's outputs that scores over all batches need, shape (n, outputs)."""
        return outputs

    def figure(self, name: str, judged: Array, labels: Array, reference: Array | None = None) -> float | None:
        """One score; None if these samples have none.

        Args:
            name: the score's name.
            judged: the `judged` outputs of at least one sample, joined.
            labels: their labels.
            reference: `judged` outputs of normal samples, see `by_reference`.
        """
        found = self._figure(name, judged, labels, reference)
        return found if found is None or np.isfinite(found) else None

    @abstractmethod
    def _figure(self, name: str, judged: Array, labels: Array, reference: Array | None) -> float | None: ...

    def figures(self, judged: Array, labels: Array, reference: Array | None = None) -> dict[str, float]:
        """Return all scores that these samples have, by name."""
        found = {one.name: self.figure(one.name, judged, labels, reference) for one in self.scores}
        return {name: value for name, value in found.items() if value is not None}


def as_classes(labels: Array) -> Array:
    """Whole float labels, shape (n,) or (n, 1), as int64 classes, shape (n,). Other labels are unchanged."""
    if labels.dtype.kind not in "buif" or labels.shape[1:] not in ((), (1,)):
        return labels
    column = labels.reshape(len(labels))
    if column.dtype.kind == "f" and not (np.isfinite(column) & (column == np.floor(column))).all():
        return labels
    return column.astype(np.int64, copy=False)


def whole_classes(labels: Array, num_outputs: int, where: str) -> NDArray[np.int64]:
    """Class numbers for a model with this number of outputs. Raises DataError."""
    if labels.size == 0 and len(labels):
        raise DataError(f"{where}: the samples have no labels; this task needs them")
    labels = as_classes(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "bui":
        raise DataError(
            f"{where}: labels have shape {labels.shape} of {labels.dtype}; classes are whole numbers"
        )
    wrong = labels[(labels < 0) | (labels >= num_outputs)]
    if wrong.size:
        raise DataError(f"{where}: label {wrong[0]}; the model has 0..{num_outputs - 1}")
    return labels.astype(np.int64, copy=False)


def numbers(labels: Array, num_numbers: int, where: str) -> Floats:
    """Numbers for a model, shape (n, num_numbers). Raises DataError."""
    if labels.size == 0 and len(labels):
        raise DataError(f"{where}: the samples have no labels; this task needs them")
    rows = labels.reshape(len(labels), -1 if len(labels) else num_numbers).astype(np.float32, copy=False)
    if len(labels) and rows.shape[1] != num_numbers:
        raise DataError(
            f"{where}: {rows.shape[1]} numbers a label; the model has {num_numbers} outputs for them"
        )
    if rows.size and not np.isfinite(rows).all():
        raise DataError(f"{where}: NaN or infinite labels; clean or drop them")
    return rows.reshape(len(labels), num_numbers)


def class_weights_fit(section: TaskSection, num_outputs: int) -> None:
    """Raise SettingError if there are class weights, but not one for each class."""
    given: Sequence[float] = section.class_weights
    if given and len(given) != num_outputs:
        raise SettingError(f"task.class_weights: {len(given)} weights for a model with {num_outputs} classes")
