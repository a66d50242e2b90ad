"""A torch module as a `Backend`, on the processor or a GPU.

Call `torch.set_num_threads(1)` in a process that shares its cores: with two threads under contention steps
took 4 to 70 times longer.
"""

import copy
from collections.abc import Collection
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fleetune.edge_agent.training.backend import (
    ExtraLoss,
    InputArray,
    LabelArray,
    SmallerNetwork,
    UpperLayers,
)
from fleetune.edge_agent.training.flat_module import FlatModule, build_module
from fleetune.edge_agent.training.forward_pass import ForwardPass
from fleetune.edge_agent.training.gpu.gpu_descent import GpuDescent
from fleetune.edge_agent.training.gpu.torch_device import PROCESSOR
from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState
from fleetune.edge_agent.training.smaller_network import SmallerNetworks, is_worth_shrinking
from fleetune.edge_agent.training.torch_steps import TorchSteps
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.loss_terms import Answer
from fleetune.protocols.model.smaller import smaller_spec
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.section import Precision
from fleetune.protocols.tasks import CLASSIFICATION
from fleetune.protocols.tasks.task import Task


class TorchBackend:
    """A `Backend` that computes with torch, starting from the module's own weights.

    Args:
        spec: description of the model.
        module: the model. Its tensors are moved into flat vectors.
        task: the run's task, which has the loss.
        device: where torch computes.
        precision: precision of training steps, see `FleetSection`.

    Raises:
        ModelError: the module's tensors differ from the spec's, or the device cannot hold them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        module: nn.Module,
        task: Task = CLASSIFICATION,
        device: torch.device = PROCESSOR,
        precision: Precision = "float32",
    ) -> None:
        self._model = FlatModule(spec, module, device)
        self._task, self.precision = task, precision
        self._forward = ForwardPass(self._model, task)
        self._steps = TorchSteps(self._model, self._forward, task, precision)
        self._smaller = SmallerNetworks(self, self._make_smaller)

    @classmethod
    def from_spec(
        cls,
        spec: ModelSpec,
        task: Task = CLASSIFICATION,
        frozen: Tensors = MappingProxyType({}),
        device: torch.device = PROCESSOR,
        precision: Precision = "float32",
    ) -> "TorchBackend":
        """Build the model by its name, with the frozen tensors of its backbone.

        Raises:
            ModelError: the model is unknown here, or it differs from the fleet's.
        """
        return cls(spec, build_module(spec, frozen), task, device, precision)

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def task(self) -> Task:
        return self._task

    @property
    def module(self) -> nn.Module:
        """The torch module, whose tensors are views of the flat vectors."""
        return self._model.module

    @property
    def device(self) -> torch.device:
        """The device where torch computes."""
        return self._model.device

    @property
    def vocabulary(self) -> int | None:
        """Number of token ids, see `Backend.vocabulary`."""
        return self._model.vocabulary

    @property
    def weights(self) -> FlatArray:
        return self._model.vectors.current_weights()

    @property
    def gradient(self) -> FlatArray:
        return self._model.vectors.current_gradient()

    def load(self, weights: FlatArray) -> None:
        """Copy `weights`, shape (spec.size,), into `self.weights`."""
        self._model.load(weights)

    def look_at(self, weights: FlatArray) -> None:
        """Load `weights`, which copies them, see `Backend.look_at`."""
        self.load(weights)

    def take(self) -> FlatArray:
        """Return a copy of the weights."""
        return self.weights.copy()

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
        """Compute the gradient of a batch and return its mean loss, see `Backend.step`."""
        return self._steps.step(x, y, key, training=training, extra_loss=extra_loss, tensors=tensors)

    def gpu_descent(
        self, settings: TrainingSection, plan: FitPlan, before: OptimiserState | None
    ) -> GpuDescent | None:
        """Return the optimiser on the GPU, see `Backend.gpu_descent`.

        The result is None if the model is on the processor.
        """
        if not self._model.vectors.on_gpu:
            return None
        return GpuDescent(self._model.vectors, self.spec.num_parameters, settings, plan, before)

    def evaluate(self, x: InputArray, y: LabelArray) -> tuple[float, NDArray[np.float32]]:
        """Return the sum of losses and the outputs, see `Backend.evaluate`."""
        return self._forward.evaluate(x, y)

    def losses(self, x: InputArray, y: LabelArray) -> NDArray[np.float64]:
        """Return the loss of each sample, see `Backend.losses`."""
        return self._forward.losses(x, y)

    def answer(self, x: InputArray, what: Answer) -> NDArray[np.float32]:
        """Return the logits, or the input of the last layer, see `Backend.answer`."""
        return self._forward.answer(x, what)

    def upper_layers(self) -> UpperLayers | None:
        """Return the layers above the frozen ones, see `Backend.upper_layers`."""
        if not self.spec.frozen or self._task.targets_are_samples:
            return None
        forward = self._forward.above_frozen_layers()
        if forward is None or forward.replay is None:
            return None
        upper = copy.copy(self)
        upper._forward, upper._steps = forward, self._steps.with_forward(forward)  # noqa: SLF001 - of this class
        replay, model = forward.replay, self._model
        return UpperLayers(
            upper, replay.size, lambda x: replay.compute_features(model.module, model.inputs(x))
        )

    def smaller_network(self, counts: tuple[int, ...]) -> SmallerNetwork | None:
        """Return the network with fewer neurons, see `Backend.smaller_network`."""
        return self._smaller.of(counts)

    def _make_smaller(self, counts: tuple[int, ...]) -> "TorchBackend | None":
        spec = smaller_spec(self.spec, counts)
        # The shape of a tensor decides what torch draws, so a smaller network would drop other neurons.
        if spec is None or not is_worth_shrinking(self.spec) or self._steps.draws_random_numbers():
            return None
        module = self._model.shrunk(spec)
        try:
            return (
                None
                if module is None
                else TorchBackend(spec, module, self._task, self.device, self.precision)
            )
        except Exception:  # noqa: BLE001 - a user's module may raise anything
            return None
