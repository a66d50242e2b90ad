"""Training steps of a torch module: forward and backward over a batch, repeated as a CUDA graph on a GPU."""

import copy
from collections.abc import Collection
from contextlib import nullcontext

import torch
from torch import Tensor

from fleetune.edge_agent.training.backend import ExtraLoss, InputArray, LabelArray
from fleetune.edge_agent.training.flat_module import FlatModule
from fleetune.edge_agent.training.forward_pass import ForwardPass
from fleetune.edge_agent.training.gpu.cuda_graphs import CudaGraphs, mutable_state
from fleetune.edge_agent.training.gpu.torch_device import (
    PROCESSOR,
    autocast_to,
    for_numpy,
    fork_seeded,
    generator_states,
)
from fleetune.edge_agent.training.torch_loss_terms import loss_term_value
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.noise import Noise
from fleetune.protocols.model.torch_batch_norm import SingleValueNorms
from fleetune.protocols.model.torch_draws import GivenDraws, Numbers
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.section import Precision
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.tasks.torch_losses import mean_loss

_NUM_TRIED = 3  # samples of the step that shows if the module draws random numbers


class TorchSteps:
    """Computes the gradients of batches into the module's flat vectors, see `Backend.step`.

    Args:
        model: the module.
        forward: computes its logits.
        task: the run's task, which has the loss.
        precision: precision of forward passes in training.
    """

    def __init__(self, model: FlatModule, forward: ForwardPass, task: Task, precision: Precision) -> None:
        self._model, self._forward, self._task, self._precision = model, forward, task, precision
        # by number of samples: what a step in training draws; empty until the first such step
        self._draws: dict[int, tuple[Noise, ...]] = {}
        self._operators_draw = True  # see `GivenDraws`
        self._cuda_graphs = CudaGraphs(model.device)

    def with_forward(self, forward: ForwardPass) -> "TorchSteps":
        """Return the same steps with another forward pass. CUDA graphs do not support replays of features."""
        other = copy.copy(self)
        other._forward, other._cuda_graphs = forward, CudaGraphs(PROCESSOR)  # noqa: SLF001 - of this class
        return other

    def step(
        self,
        x: InputArray,
        y: LabelArray,
        key: Key,
        *,
        training: bool,
        extra_loss: ExtraLoss | None,
        tensors: Collection[str] | None,
    ) -> float:
        """Compute the gradient of a batch and return its mean loss, see `Backend.step`."""
        module = self._model.module
        if module.training is not training:
            module.train(training)
        self._model.vectors.upload()
        try:
            with SingleValueNorms() if len(y) == 1 else nullcontext():
                if extra_loss is None and self._cuda_graphs.enabled and self._knows_draws(len(y), training):
                    loss = self._graph_step(x, y, key, training, tensors)
                else:
                    loss = self._eager_step(x, y, key, training, extra_loss, tensors)
        except (ValueError, RuntimeError, IndexError) as problem:  # torch raises any of these for a bad batch
            raise ModelError(
                f"model {self._model.spec.name} cannot train on a batch of {len(y)}: {problem}"
            ) from problem
        self._model.vectors.download(statistics=training)
        return loss.item()

    def draws_random_numbers(self) -> bool:
        """True if a step in training draws random numbers."""
        device = self._model.device
        self._model.module.train()
        with fork_seeded(Key(0), device), torch.no_grad():
            before = generator_states(device)
            try:
                samples = for_numpy(self._model.synthetic_samples(_NUM_TRIED)).numpy()
                self._training_logits(samples, Key(0))
            except (ValueError, RuntimeError, IndexError):  # `step` would fail on such a batch, too
                return True
            return not self._draws_nothing or before != generator_states(device)

    def _eager_step(
        self,
        x: InputArray,
        y: LabelArray,
        key: Key,
        training: bool,
        extra_loss: ExtraLoss | None,
        tensors: Collection[str] | None,
    ) -> Tensor:
        model, device, graphs = self._model, self._model.device, self._cuda_graphs
        model.vectors.torch_gradient.zero_()
        is_first = training and not self._draws
        with fork_seeded(key, device), model.only_gradients_of(tensors), model.last_layer.watched() as calls:
            before = mutable_state(model.module, device) if graphs.enabled else []
            with autocast_to(self._precision if training else "float32", device):
                logits = (self._training_logits(x, key) if training else self._forward.logits(x)).float()
            if graphs.enabled and before != mutable_state(model.module, device):
                graphs.disable()
            loss = mean_loss(self._task.loss, self._task.section, logits, model.targets(y))
            total = loss
            if extra_loss is not None:
                of_logits = extra_loss.loss_term.answer == "logits"
                own = logits if of_logits else model.last_layer.features(calls)
                total = loss + loss_term_value(extra_loss, own)
            if total.requires_grad:
                # the first step of all shows if a module draws; watching each step would slow it down
                with GivenDraws(self._refuse_draw) if is_first else nullcontext():
                    total.backward()  # type: ignore[no-untyped-call]
        return loss

    def _graph_step(
        self,
        x: InputArray,
        y: LabelArray,
        key: Key,
        training: bool,
        tensors: Collection[str] | None,
    ) -> Tensor:
        """Compute a step by replaying a recorded CUDA graph of such a step."""
        model = self._model
        model.check_labels(y)
        noises = self._draws.get(len(y), ()) if training else ()
        drawn = [noise.draw(key, index, len(y)) for index, noise in enumerate(noises)]
        wanted = [name for name in model.parameters if tensors is None or name in tensors]

        def compute(x: Tensor, y: Tensor, *drawn: Tensor) -> tuple[Tensor]:
            model.vectors.torch_gradient.zero_()
            drawing = self._given(lambda index, _: drawn[index]) if drawn else nullcontext()
            with drawing, autocast_to(self._precision if training else "float32", model.device):
                logits = model.module(model.shaped(x)).float()
            loss = mean_loss(self._task.loss, self._task.section, logits, y)
            parameters = [model.parameters[name] for name in wanted]
            found = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
            for parameter, gradient in zip(parameters, found, strict=True):
                if parameter.grad is not None and gradient is not None:
                    parameter.grad.copy_(gradient)
            return (loss.detach(),)

        given = [torch.from_numpy(one) for one in (x, y, *drawn)]
        signature = training, tuple(wanted), *((one.shape, one.dtype) for one in given)
        (loss,) = self._cuda_graphs.run(signature, compute, given)
        return loss

    def _knows_draws(self, num_samples: int, training: bool) -> bool:
        return self._draws_nothing or (num_samples in self._draws if training else bool(self._draws))

    @property
    def _draws_nothing(self) -> bool:
        """True if a step in training has shown that the module draws no random numbers."""
        return bool(self._draws) and not any(self._draws.values())

    def _training_logits(self, x: InputArray, key: Key) -> Tensor:
        """Return the logits in training mode. `key` gives the random numbers: the same in all backends."""
        if self._draws_nothing:
            return self._forward.logits(x)
        noises = []

        def numbers(index: int, noise: Noise) -> Tensor:
            noises.append(noise)
            return torch.from_numpy(noise.draw(key, index, len(x))).to(self._model.device)

        with self._given(numbers) as given:
            logits = self._forward.logits(x)
        self._operators_draw = given.operators_draw
        if given.reads_values:
            self._cuda_graphs.disable()
        self._draws[len(x)] = tuple(noises)
        return logits

    def _refuse_draw(self, _: int, noise: Noise) -> Tensor:
        """Refuse a draw in the backward pass: the recomputed layers would drop other values than before."""
        raise ModelError(
            f"model {self._model.spec.name} draws random numbers ({noise.kind}) in the backward pass, as"
            " torch.utils.checkpoint does; turn gradient checkpointing off"
        )

    def _given(self, numbers: Numbers) -> GivenDraws:
        return GivenDraws(numbers, operators=self._operators_draw)
