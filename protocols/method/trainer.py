"""A device's model and data as a method sees them, and how it says that they are to be trained."""

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

Rows = NDArray[np.intp]  # which training samples, shape (n,)
Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Pull:
    """A term strength * ||w - target||^2 added to the loss (gradient 2 * strength * (w - target)).

    Attributes:
        target: shape (spec.size,).
        strength: at least 0.
        mask: entries that are pulled, shape (spec.size,); None: all parameters.
    """

    target: FlatArray
    strength: float
    mask: MaskArray | None = None


@dataclass(frozen=True)
class LowerLayers:
    """The first layers, to be trained in a share of the steps only, evenly spread over them.

    There their gradient counts 1 / share times. In the other steps they stay exactly as they are, the
    optimiser remembers nothing of these steps for them, and the backward pass ends above them.

    Attributes:
        stop: the entries before it are theirs.
        share: of the steps, in (0, 1].
    """

    stop: int
    share: float

    def train_in(self, step: int, key: Key) -> bool:
        """Whether they do in this step, of which the first is 0; `key` is that of `Trainer.fit`. Of n steps
        it is true in floor(share * n) or one more; over keys in share * n in the mean.
        """
        begin = key.child("lower layers").value / 2**64
        return math.floor((step + 1) * self.share + begin) > math.floor(step * self.share + begin)


@dataclass(frozen=True)
class FitPlan:
    """How to train locally, beyond the run's [training] settings.

    Attributes:
        trainable: entries that may change, shape (spec.size,); None: all parameters. Whatever the
            optimiser's momentum or weight decay, the others stay exactly as they are; running
            statistics always follow the data.
        neurons: a promise: all parameters between other neurons are 0 in the weights to train from, and not
            trainable. A trainer may then train the network of these neurons alone, which is the same but for
            rounding and takes less time; None: nothing is promised.
        lower: layers that train in a share of the steps only; None: all train in every step.
        pull: an extra term of the loss.
        loss_term: an extra term of the loss by what other models answer; a device whose backend cannot
            compute it raises ModelError.
        epochs: instead of the run's number of epochs.
        keep_last_gradient: also return the gradient of the last batch.
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
    """What local training made.

    Attributes:
        weights: a new vector, shape (spec.size,).
        loss: mean training loss over the last epoch's samples, as seen while training, without pull or
            loss term.
        num_steps: optimiser steps taken.
        local_work: how much of the run's epochs these are; None: the plan set its own, or there are none.
        last_gradient: of the last batch at the weights before its step, when asked for.
    """

    weights: FlatArray
    loss: float
    num_steps: int
    last_gradient: FlatArray | None = None
    local_work: float | None = None


def num_local_steps(num_steps: int, local_work: float) -> int:
    """How many steps a device takes that does so much of those of a round; at least one."""
    return max(1, round(local_work * num_steps)) if num_steps else 0


class Trainer(Protocol):
    """A device's model and data, as a method sees them. It keeps no weights between calls."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def num_samples(self) -> int:
        """Training samples (validation and test not counted)."""
        ...

    @property
    def num_classes_held(self) -> int:
        """How many of the model's classes occur among the training samples; 1 where the task has none."""
        ...

    def fit(self, weights: FlatArray, plan: FitPlan, key: Key) -> Fit:
        """Train from `weights`; `key` decides the order of samples and dropout.

        Raises:
            TrainingStopped: the agent wants to stop; nothing was changed.
        """
        ...

    def loss(self, weights: FlatArray, part: Part = "train", rows: Rows | None = None) -> float:
        """Mean loss in evaluation mode over a part, or those of its samples in `rows`. Of none it is 0."""
        ...

    def accuracy(self, weights: FlatArray, part: Part) -> float | None:
        """Fraction predicted correctly in evaluation mode, 0..1; None: the part is empty, or the task has no
        accuracy (see `Method.tasks`). A method may ask
        for the training and validation parts only: nothing is ever chosen by the test split.
        """
        ...

    def losses(self, weights: FlatArray, part: Part = "train") -> NDArray[np.float64]:
        """Each sample's loss in evaluation mode over a part, shape (n,)."""
        ...

    def score(self, weights: FlatArray, part: Part) -> float | None:
        """Score of a model by the run's task (accuracy in classification); None if the part cannot show it.

        A method may not ask for the test part.
        """
        ...

    @property
    def lower_is_better(self) -> bool:
        """True if the lower of two scores is the better one."""
        ...

    def gradient(self, weights: FlatArray, rows: Rows | None = None) -> FlatArray:
        """Gradient of the mean loss in evaluation mode, shape (spec.size,), 0 at running statistics.

        It is taken over the training samples in `rows`, or over all of them.
        """
        ...

    def batches(self, key: Key) -> Iterable[Rows]:
        """Rows of the training batches in the order of `fit`, for all epochs of the run.

        Raises:
            TrainingStopped: the agent wants to stop.
        """
        ...
