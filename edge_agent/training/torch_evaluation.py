"""Losses, outputs and answers of a torch module in evaluation mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fleetune.edge_agent.training.backend import InputArray, LabelArray
from fleetune.edge_agent.training.flat_module import FlatModule
from fleetune.edge_agent.training.forward_pass import ForwardPass
from fleetune.edge_agent.training.gpu.torch_device import for_numpy
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.loss_terms import Answer
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.tasks.torch_losses import is_plain, sample_losses
from fleetune.protocols.user_code import as_line


class TorchEvaluation:
    """Evaluates a module on batches, see `Backend.evaluate`, `Backend.losses` and `Backend.answer`."""

    def __init__(self, model: FlatModule, forward: ForwardPass, task: Task) -> None:
        self._model, self._forward, self._task = model, forward, task

    def evaluate(self, x: InputArray, y: LabelArray) -> tuple[float, NDArray[np.float32]]:
        """Sum of the losses, and the outputs, shape (n, outputs)."""
        with self._evaluating(x):
            outputs, targets = self._forward.logits(x), self._model.targets(y)
            if is_plain(self._task.loss, self._task.section):
                total = functional.cross_entropy(outputs, targets, reduction="sum")
            else:
                total = self._sample_losses(outputs, targets).sum()
            return total.item(), for_numpy(outputs).numpy()

    def losses(self, x: InputArray, y: LabelArray) -> NDArray[np.float64]:
        """The loss of each sample, shape (n,)."""
        with self._evaluating(x):
            logits, targets = self._forward.logits(x), self._model.targets(y)
            found: NDArray[np.float64] = self._sample_losses(logits, targets).numpy()
        return found

    def answer(self, x: InputArray, what: Answer) -> NDArray[np.float32]:
        """The logits, or the input of the last layer, for each sample."""
        last_layer = self._model.last_layer
        with self._evaluating(x), last_layer.watched() as calls:
            logits = self._forward.logits(x)
            array: NDArray[np.float32] = for_numpy(
                logits if what == "logits" else last_layer.features(calls)
            ).numpy()
            return array

    def _sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return for_numpy(sample_losses(self._task.loss, self._task.section, outputs, targets)).double()

    @contextmanager
    def _evaluating(self, x: InputArray) -> Iterator[None]:
        """Put the module into evaluation mode; raise torch's errors as a ModelError that names the part."""
        self._model.module.eval()
        self._model.vectors.upload()
        try:
            with torch.inference_mode():
                yield
        except (ValueError, RuntimeError, IndexError, TypeError) as problem:
            with torch.no_grad():
                failing = self._forward.failing_part(x)
            where, why = failing or ("the model itself", as_line(problem))
            raise ModelError(
                f"model {self._model.spec.name} cannot evaluate a batch of {len(x)}: {where}: {why};"
                " it must accept batches of any size from 1"
            ) from problem
