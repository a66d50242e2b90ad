"""The seam between the local training loop and whatever computes gradients.

A backend knows a model's forward and backward pass and nothing else. Frozen entries, the pull, momentum
and weight decay live above it, once, in `local_training.py`, on the flat vector.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState
from fleetune.protocols.errors import ModelError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.loss_terms import Answer, LossTerm
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.tasks.task import Task

InputArray = NDArray[np.float32] | NDArray[np.int64]  # numbers, or token ids
LabelArray = NDArray[np.int64] | NDArray[np.float32]  # classes, or numbers: see the run's task


@dataclass(frozen=True)
class ExtraLoss:
    """A loss term, and what its models answered on a batch of n samples: for each model, shape (n, ...)."""

    loss_term: LossTerm
    answers: tuple[NDArray[np.float32], ...]


@dataclass(frozen=True)
class UpperLayers:
    """A model from its lowest trained layer on, where all below is frozen.

    Attributes:
        backend: its x are features, shape (n, size). It shares the whole model's vectors: use one of both.
        size: numbers a sample.
        features: of samples, shape (n, size); in evaluation mode, which below is no other.
    """

    backend: "Backend"
    size: int
    features: Callable[[InputArray], FlatArray]


@dataclass(frozen=True)
class SmallerNetwork:
    """A network with fewer neurons.

    Attributes:
        backend: of it.
        fading: by the names of statistics, what a step multiplies those of absent neurons by.
    """

    backend: "Backend"
    fading: dict[str, float]


class Backend(Protocol):
    """One model, computing in one flat vector.

    `weights` and `gradient` are live: always the same two arrays, changed in place by both sides.
    Copy before keeping.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def task(self) -> Task:
        """Whose loss it computes."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """Samples are token ids, whole numbers from 0 and below this; None: they are numbers."""
        ...

    @property
    def weights(self) -> FlatArray:
        """What the model computes with: parameters, then running statistics, shape (spec.size,).
        Writing to it changes the model.
        """
        ...

    @property
    def gradient(self) -> FlatArray:
        """What the last `step` found, shape (spec.size,), 0 at statistics. The caller may overwrite it."""
        ...

    def upper_layers(self) -> UpperLayers | None:
        """The part of the model that features can be computed for once; None: there is none, or it cannot be
        parted.
        """
        ...

    def smaller_network(self, counts: tuple[int, ...]) -> "SmallerNetwork | None":
        """The network with so many neurons in each group, or a few more; its backend counts them.

        It gives what the whole model gives whose other neurons' parameters are 0, whichever they are.

        Returns:
            None: there is none, or it would give something else.
        """
        ...

    def gpu_descent(
        self, settings: TrainingSection, plan: FitPlan, before: OptimiserState | None
    ) -> "DescentSteps | None":
        """The optimiser at work where this computes, from what was loaded on: until the next `load` nobody
        writes to `weights` or `gradient`, and each asking for one copies it from there.

        Returns:
            None: this computes with those very arrays, so that `Descent` is at work on them.
        """
        ...

    def load(self, weights: FlatArray) -> None:
        """Copy `weights`, shape (spec.size,), into `self.weights`.

        Raises:
            ModelError: of another length.
        """
        ...

    def step(
        self,
        x: InputArray,
        y: LabelArray,
        key: Key,
        *,
        training: bool = True,
        extra_loss: ExtraLoss | None = None,
        tensors: Collection[str] | None = None,
    ) -> float:
        """Forward and backward over one batch; fills `gradient`, leaves the parameters alone.

        Args:
            x: shape (n, *spec.input_shape), n at least 1.
            y: the batch's targets, shape (n, *task.target_shape(...)).
            key: of dropout and whatever else the model draws.
            training: batch statistics, dropout, and running statistics updated in `weights`; False:
                the gradient of the model as it evaluates, statistics untouched.
            extra_loss: its loss term (see `protocols.model.loss_terms`) is added to the loss before the
                backward pass.
            tensors: names of the parameters whose gradients are wanted; `gradient` is 0 at the others, and
                the backward pass goes no deeper than the lowest of them. What is wanted, the loss and the
                statistics are the same to the bit. None: all; it may be empty.

        Returns:
            The batch's mean loss (the task's, without the loss term), not necessarily finite.

        Raises:
            ModelError: the model cannot process such a batch, or the backend has no loss terms.
        """
        ...

    def answer(self, x: InputArray, what: Answer) -> NDArray[np.float32]:
        """What the model gives, or gives its last layer, for each sample in evaluation mode: shape (n, ...).

        Raises:
            ModelError: the backend has no loss terms, or its model no such layer.
        """
        ...

    def evaluate(self, x: InputArray, y: LabelArray) -> tuple[float, NDArray[np.float32]]:
        """Sum of the losses, and what the model gives, shape (n, outputs), in evaluation mode."""
        ...

    def losses(self, x: InputArray, y: LabelArray) -> NDArray[np.float64]:
        """Each sample's loss in evaluation mode, shape (n,)."""
        ...


class DescentSteps(Protocol):
    """See `edge_agent.training.descent.Descent`."""

    def step(self, *, move_lower: bool = True) -> float | None:
        """Move the trainable weights by the gradient."""
        ...

    def state(self) -> OptimiserState:
        """What the optimiser remembers now."""
        ...


def check_labels(spec: ModelSpec, y: LabelArray) -> None:
    """Raises ModelError: a label is none of the model's classes."""
    if len(y) and (y.min() < 0 or y.max() >= spec.num_classes):
        wrong = y.min() if y.min() < 0 else y.max()
        raise ModelError(f"label {wrong}: model {spec.name} has classes 0..{spec.num_classes - 1}")
