"""The interface between the local training loop and the libraries that compute gradients.

A backend knows only a model's forward and backward pass. `local_training.py` adds frozen entries, the
pull, momentum and weight decay on the flat vector, in the same way for every backend.
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

InputArray = NDArray[np.float32] | NDArray[np.int64]  # numbers or token ids
LabelArray = NDArray[np.int64] | NDArray[np.float32]  # classes or numbers, depending on the run's task


@dataclass(frozen=True)
class ExtraLoss:
    """A loss term and the answers of its models on a batch of n samples, one array of shape (n, ...) each."""

    loss_term: LossTerm
    answers: tuple[NDArray[np.float32], ...]


@dataclass(frozen=True)
class UpperLayers:
    """A model from its lowest trained layer on. All layers below are frozen.

    Attributes:
        backend: the upper layers. Their inputs are features, shape (n, size). They share the vectors of the
            whole model, so use only one of the two backends.
        size: number of features of a sample.
        features: computes the features of samples, shape (n, size), in evaluation mode. The frozen layers
            compute the same in training mode.
    """

    backend: "Backend"
    size: int
    features: Callable[[InputArray], FlatArray]


@dataclass(frozen=True)
class SmallerNetwork:
    """A network with fewer neurons.

    Attributes:
        backend: computes the network.
        fading: by the name of a running statistic, the factor that a step multiplies it by at absent neurons.
    """

    backend: "Backend"
    fading: dict[str, float]


class Backend(Protocol):
    """Computes the forward and backward pass of one model, on one flat vector.

    From one `load` to the next, `weights` and `gradient` are the same two arrays. The backend and its caller
    change them in place, so copy an array to keep its values, or `take` it.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def task(self) -> Task:
        """The run's task, which has the loss."""
        ...

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids, if samples are whole numbers from 0 to below it; None for other samples."""
        ...

    @property
    def weights(self) -> FlatArray:
        """The model's current parameters, then its running statistics, shape (spec.size,).

        Writing to the array changes the model.
        """
        ...

    @property
    def gradient(self) -> FlatArray:
        """The gradient of the last `step`, shape (spec.size,), 0 at statistics.

        The caller may overwrite it.
        """
        ...

    def upper_layers(self) -> UpperLayers | None:
        """Return the layers above the frozen ones, whose features can be cached; None if the model cannot be
        divided.
        """
        ...

    def smaller_network(self, counts: tuple[int, ...]) -> "SmallerNetwork | None":
        """Return a network that keeps at least `counts` neurons in each group; None if none gives the same
        output.

        Its spec has the exact numbers of neurons. Its output equals that of the whole model with all other
        neurons' parameters set to 0.

        Returns:
            None if no such network exists, or if its output would differ.
        """
        ...

    def gpu_descent(
        self, settings: TrainingSection, plan: FitPlan, before: OptimiserState | None
    ) -> "DescentSteps | None":
        """Return the optimiser on the GPU, starting from the loaded weights; None to use `Descent` on the
        arrays.

        Until the next `load` do not write to `weights` or `gradient`. Each read of them copies from the GPU.
        """
        ...

    def load(self, weights: FlatArray) -> None:
        """Copy `weights`, shape (spec.size,), into `self.weights`.

        Raises:
            ModelError: `weights` has another length.
        """
        ...

    def look_at(self, weights: FlatArray) -> None:
        """Load `weights` only to compute with them, not to change them; a backend may use the array itself.

        Until the next `load` or `look_at`, the caller changes neither `weights` nor `self.weights`.

        Raises:
            ModelError: `weights` has another length.
        """
        ...

    def take(self) -> FlatArray:
        """Return the weights in an array that the backend no longer changes; it may be a copy.

        `gradient` is no longer valid.
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
        """Compute the gradient of a batch into `gradient`; the parameters do not change.

        Args:
            x: inputs, shape (n, *spec.input_shape), n at least 1.
            y: targets, shape (n, *task.target_shape(...)).
            key: seed of dropout and of all other random draws of the model.
            training: True uses batch statistics and dropout, and updates the running statistics in `weights`.
                False computes the gradient in evaluation mode and leaves the statistics unchanged.
            extra_loss: loss term that is added to the loss before the backward pass, see
                `protocols.model.loss_terms`.
            tensors: names of the parameters whose gradients are needed. `gradient` is 0 at all others, and
                the backward pass stops at the lowest of them. Loss, statistics and these gradients do not
                depend on the choice, to the bit; None for all parameters. An empty collection is allowed.

        Returns:
            Mean loss of the batch by the task, without the loss term. It may be NaN or infinite.

        Raises:
            ModelError: the model cannot process the batch, or the backend does not support loss terms.
        """
        ...

    def answer(self, x: InputArray, what: Answer) -> NDArray[np.float32]:
        """Return the logits, or the input of the last layer, of each sample in evaluation mode, shape (n,
        ...).

        Raises:
            ModelError: the backend does not support loss terms, or the model has no such layer.
        """
        ...

    def evaluate(self, x: InputArray, y: LabelArray) -> tuple[float, NDArray[np.float32]]:
        """Return the sum of the losses and the model's outputs, shape (n, outputs), in evaluation mode."""
        ...

    def losses(self, x: InputArray, y: LabelArray) -> NDArray[np.float64]:
        """Return the loss of each sample in evaluation mode, shape (n,)."""
        ...


class DescentSteps(Protocol):
    """An optimiser that moves the weights of a backend, see `edge_agent.training.descent.Descent`."""

    def step(self, *, move_lower: bool = True) -> float | None:
        """Move the trainable weights by the gradient."""
        ...

    def state(self) -> OptimiserState:
        """Return the optimiser's present state."""
        ...


def check_labels(spec: ModelSpec, y: LabelArray) -> None:
    """Raise ModelError if a label is not one of the model's classes."""
    if len(y) and (y.min() < 0 or y.max() >= spec.num_classes):
        wrong = y.min() if y.min() < 0 else y.max()
        raise ModelError(f"label {wrong} is unknown: model {spec.name} has classes 0..{spec.num_classes - 1}")
