"""Interface through which a method sees a device's model and data, and plans their training."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.model.loss_terms import LossTerm
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.selection import ChosenNeurons

Rows = NDArray[np.intp]  # indices of training samples, shape (n,)
Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Pull:
    """A loss term strength * ||w - target||^2 (gradient 2 * strength * (w - target)).

    Attributes:
        target: weights that the term pulls to, shape (spec.size,).
        strength: factor of the term, at least 0.
        mask: True for each entry that is pulled, shape (spec.size,); None for all parameters.
    """

    target: FlatArray
    strength: float
    mask: MaskArray | None = None


@dataclass(frozen=True)
class LowerLayers:
    """The first layers, trained only in a share of the steps, which is evenly spread.

    In these steps their gradient is multiplied by 1 / share. In all other steps these layers stay exactly as
    they are, the optimiser keeps its state for them, and the backward pass ends above them.

    Attributes:
        stop: end of these layers in the flat vector.
        share: share of the steps, in (0, 1].
    """

    stop: int
    share: float

    def train_in(self, step: int, key: Key) -> bool:
        """True if the layers train in this step. The first step is 0; `key` is that of `Trainer.fit`.

        Of n steps, it is true in floor(share * n) or one more. The mean over keys is share * n.
        """
        begin = key.child("lower layers").value / 2**64
        return math.floor((step + 1) * self.share + begin) > math.floor(step * self.share + begin)


@dataclass(frozen=True)
class FitPlan:
    """How to train locally, beyond the run's [training] settings.

    Attributes:
        trainable: True for each entry that may change, shape (spec.size,); None for all parameters. All other
            entries stay exactly as they are, despite momentum or weight decay. Running statistics always
            follow the data.
        neurons: neurons that form a smaller network; None if there is no such network. The method guarantees
            that all parameters between other neurons start at 0 and are not trainable. A trainer may then
            train this network only, which takes less time and gives the same result but for rounding.
        lower: layers that train in a share of the steps only; None if all train in every step.
        pull: an extra term of the loss.
        loss_term: an extra term of the loss from the outputs of other models. A device whose backend cannot
            compute it raises ModelError.
        epochs: number of epochs; None for that of the run.
        keep_last_gradient: True to return the gradient of the last batch, too.
    """

    trainable: MaskArray | None = None
    neurons: ChosenNeurons | None = None
    lower: LowerLayers | None = None
    pull: Pull | None = None
    loss_term: LossTerm | None = None
    epochs: int | None = None
    keep_last_gradient: bool = False


@dataclass(frozen=True)
class Fit:
    """Result of local training.

    Attributes:
        weights: new weights, shape (spec.size,).
        loss: mean loss of the last epoch's samples during training, without pull or loss term.
        num_steps: number of optimiser steps.
        local_work: share of the run's epochs that was trained; None if the plan set its own epochs, or if the
            run has none.
        last_gradient: gradient of the last batch at the weights before its step, if the plan requested it.
    """

    weights: FlatArray
    loss: float
    num_steps: int
    last_gradient: FlatArray | None = None
    local_work: float | None = None


def num_local_steps(num_steps: int, local_work: float) -> int:
    """Return the steps of a device that does a share `local_work` of a round's steps; at least one if there
    are any.
    """
    return max(1, round(local_work * num_steps)) if num_steps else 0


class Trainer(Protocol):
    """A device's model and data, as a method sees them. It keeps no weights between calls."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def num_samples(self) -> int:
        """Number of training samples; validation and test samples are not counted."""
        ...

    @property
    def num_classes_held(self) -> int:
        """Number of the model's classes among the training samples; 1 if the task has no classes."""
        ...

    def fit(self, weights: FlatArray, plan: FitPlan, key: Key) -> Fit:
        """Train from `weights`. `key` decides the order of samples and dropout.

        Raises:
            TrainingStopped: the agent is stopping; nothing was changed.
        """
        ...

    def loss(self, weights: FlatArray, part: Part = "train", rows: Rows | None = None) -> float:
        """Return the mean loss in evaluation mode over a part, or over its samples in `rows`; 0 without
        samples.
        """
        ...

    def accuracy(self, weights: FlatArray, part: Part) -> float | None:
        """Return the accuracy in evaluation mode, 0..1; None if the part is empty or the task has no
        accuracy.

        See `Method.tasks`. A method may use the training and validation parts only, because nothing may be
        chosen by the test split.
        """
        ...

    def losses(self, weights: FlatArray, part: Part = "train") -> NDArray[np.float64]:
        """Return the loss of each sample of a part in evaluation mode, shape (n,)."""
        ...

    def score(self, weights: FlatArray, part: Part) -> float | None:
        """Return a model's score by the run's task (accuracy in classification); None if the part has none.

        A method may not use the test part.
        """
        ...

    @property
    def lower_is_better(self) -> bool:
        """True if the lower of two scores is the better one."""
        ...

    def gradient(self, weights: FlatArray, rows: Rows | None = None) -> FlatArray:
        """Return the gradient of the mean loss in evaluation mode, shape (spec.size,), 0 for running
        statistics.

        The mean is over the training samples in `rows`, or over all training samples.
        """
        ...

    def batches(self, key: Key) -> Iterable[Rows]:
        """Yield the rows of the training batches in the order of `fit`, for all epochs of the run.

        Raises:
            TrainingStopped: the agent is stopping.
        """
        ...
