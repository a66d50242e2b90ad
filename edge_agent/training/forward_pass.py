"""A torch module's forward pass, from samples or from cached features of its frozen layers."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fleetune.edge_agent.training import frozen_layers
from fleetune.edge_agent.training.backend import InputArray, LabelArray
from fleetune.edge_agent.training.flat_module import FlatModule
from fleetune.edge_agent.training.gpu.torch_device import for_numpy
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.loss_terms import Answer
from fleetune.protocols.model.torch_failures import failing_part
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.tasks.torch_losses import is_plain, sample_losses
from fleetune.protocols.user_code import as_line


class ForwardPass:
    """Computes the outputs of a module and, in evaluation mode, its losses.

    Args:
        model: the module.
        task: the run's task, which has the loss.
        replay: how to start from features; None if the inputs are samples.
    """

    def __init__(self, model: FlatModule, task: Task, replay: frozen_layers.Replay | None = None) -> None:
        self._model, self._task, self.replay = model, task, replay

    def logits(self, x: InputArray) -> Tensor:
        """Return the module's output in its present mode, shape (n, outputs).

        Raises:
            ModelError: the output has another shape, or the module's calls depend on its samples.
        """
        spec, module = self._model.spec, self._model.module
        try:
            if self.replay is None:
                logits: Tensor = module(self._model.inputs(x))
            else:
                logits = self.replay.forward(module, np.asarray(x, np.float32))
        except frozen_layers.ReplayDiffers:
            raise ModelError(
                f"model {spec.name} calls other functions for some samples than for others, so its frozen"
                " layers cannot be skipped; let it call the same functions for all samples"
            ) from None
        wanted = len(x), spec.num_classes
        if logits.shape != wanted:
            raise ModelError(
                f"model {spec.name} returns shape {tuple(logits.shape)} for a batch of {len(x)} samples;"
                f" return {wanted}, for example by flatten(1) in place of squeeze()"
            )
        return logits

    def above_frozen_layers(self) -> "ForwardPass | None":
        """Return the forward pass that starts from the frozen layers' features; None if there is none."""
        if self.replay is not None:
            return None
        replay = frozen_layers.record_boundary(self._model.module, self._model.synthetic_samples)
        return None if replay is None else ForwardPass(self._model, self._task, replay)

    def evaluate(self, x: InputArray, y: LabelArray) -> tuple[float, NDArray[np.float32]]:
        """Return the sum of the losses and the outputs, see `Backend.evaluate`."""
        with self._evaluating(x):
            outputs, targets = self.logits(x), self._model.targets(y)
            if is_plain(self._task.loss, self._task.section):
                total = functional.cross_entropy(outputs, targets, reduction="sum")
            else:
                total = self._sample_losses(outputs, targets).sum()
            return total.item(), for_numpy(outputs).numpy()

    def losses(self, x: InputArray, y: LabelArray) -> NDArray[np.float64]:
        """Return the loss of each sample, see `Backend.losses`."""
        with self._evaluating(x):
            logits, targets = self.logits(x), self._model.targets(y)
            found: NDArray[np.float64] = self._sample_losses(logits, targets).numpy()
        return found

    def answer(self, x: InputArray, what: Answer) -> NDArray[np.float32]:
        """Return the logits, or the input of the last layer, see `Backend.answer`."""
        last_layer = self._model.last_layer
        with self._evaluating(x), last_layer.watched() as calls:
            logits = self.logits(x)
            array: NDArray[np.float32] = for_numpy(
                logits if what == "logits" else last_layer.features(calls)
            ).numpy()
            return array

    def _sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return for_numpy(sample_losses(self._task.loss, self._task.section, outputs, targets)).double()

    @contextmanager
    def _evaluating(self, x: InputArray) -> Iterator[None]:
        """Put the module into evaluation mode during this context.

        Errors of torch then name the submodule.
        """
        self._model.module.eval()
        self._model.vectors.upload()
        try:
            with torch.inference_mode():
                yield
        except (ValueError, RuntimeError, IndexError, TypeError) as problem:
            failing = None
            if self.replay is None:
                with torch.no_grad():
                    failing = failing_part(self._model.module, self._model.inputs(x))
            where, why = failing or ("the model itself", as_line(problem))
            raise ModelError(
                f"model {self._model.spec.name} cannot evaluate a batch of {len(x)} samples: {where}: {why};"
                " let it accept batches of any size from 1"
            ) from problem
