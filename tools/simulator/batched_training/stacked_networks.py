"""Several networks of one architecture in torch, each with weights of its own, that step as one."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional

from fleetune.edge_agent.training.backend import ExtraLoss, InputArray, LabelArray, check_labels
from fleetune.edge_agent.training.gpu.cuda_graphs import Compute, CudaGraphs, mutable_state
from fleetune.edge_agent.training.gpu.flat_vectors import FlatVectors
from fleetune.edge_agent.training.gpu.gpu_descent import GpuDescent, step_all
from fleetune.edge_agent.training.gpu.torch_device import autocast_to, for_numpy
from fleetune.edge_agent.training.torch_backend import TorchBackend
from fleetune.edge_agent.training.torch_loss_terms import loss_term_value
from fleetune.protocols.bundle.bundle import Noise
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.torch_batch_norm import SingleValueNorms
from fleetune.protocols.model.torch_dropout import Dropouts
from fleetune.protocols.randomness import Key
from fleetune.protocols.tasks.torch_losses import is_plain, mean_loss, sample_losses

_TRIED_SAMPLES = 3
# Tolerance relative to a vector's length. Sums in another order differ by at most 3e-6. A ReLU whose input is
# near 0 may switch: that changed a ResNet-18's gradient by 0.011. A wrong function differs far more.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class Step:
    """Arguments of `Backend.step`."""

    x: InputArray
    y: LabelArray
    key: Key
    training: bool
    extra_loss: ExtraLoss | None
    tensors: frozenset[str] | None

    @property
    def alike(self) -> object:
        """A key; steps with equal keys can be computed as one."""
        tensors = None if self.tensors is None else tuple(sorted(self.tensors))
        return "step", self.x.shape, self.x.dtype, self.y.shape, self.y.dtype, self.training, tensors

    @property
    def stacks(self) -> bool:
        """False for a loss term on the last layer's input, because it looks into a single network."""
        return self.extra_loss is None or self.extra_loss.loss_term.answer == "logits"


@dataclass(frozen=True)
class Evaluation:
    """Arguments of `Backend.evaluate`."""

    x: InputArray
    y: LabelArray

    @property
    def alike(self) -> object:
        """A key; evaluations with equal keys can be computed as one."""
        return "evaluation", self.x.shape, self.x.dtype, self.y.shape, self.y.dtype

    stacks = True


@dataclass(frozen=True)
class Descend:
    """A step of an optimiser on the device where torch computes."""

    descent: GpuDescent
    move_lower: bool

    @property
    def alike(self) -> object:
        """A key; steps with equal keys can be computed as one."""
        return "descend", self.descent.alike(move_lower=self.move_lower)

    stacks = True


@dataclass(frozen=True)
class SingleCall:
    """A call that is made for one network at a time."""

    call: Callable[[TorchBackend], Any]

    alike = "other"
    stacks = False


Request = Step | Evaluation | Descend | SingleCall


class StackedNetworks:
    """Weights and gradients of several devices' networks, and the steps that they compute together.

    Attributes:
        vectors: weights and gradients, one row for each network.
        weights, gradients: the same in this process's memory, as NumPy arrays.

    Args:
        backend: a backend of one such network. It computes what cannot be stacked; its vectors are scratch
            space.
        rows: number of networks.

    Raises:
        ModelError: the model does not compute, or counts its own steps.
    """

    def __init__(self, backend: TorchBackend, rows: int) -> None:
        self._backend, self._spec, self._task = backend, backend.spec, backend.task
        self._module, self._device = backend.module, backend.device
        self._dtype = torch.float32 if backend.vocabulary is None else torch.int64
        self.vectors = FlatVectors(self._spec, self._device, rows)
        self.weights, self.gradients = self.vectors.weights.numpy(), self.vectors.gradients.numpy()
        self._cuda_graphs = CudaGraphs(self._device)
        self._places = {
            tensor.name: (self.vectors.places[tensor.name], tensor) for tensor in self._spec.tensors
        }
        self._statistics = slice(self.vectors.torch_stop(self._spec.num_parameters), None)
        if any(getattr(part, "momentum", 0) is None for part in self._module.modules()):
            raise ModelError(
                "a norm layer without momentum counts the steps of one network: it cannot be stacked"
            )
        self._dropouts, self._is_watched = self._dropouts_found(), False

    def carry_out(self, asked: Mapping[int, Request]) -> dict[int, Any]:
        """The answer to each row's request, or its exception. Requests with equal keys are computed at
        once.
        """
        alike: dict[object, list[int]] = {}
        for row, one in asked.items():
            alike.setdefault(one.alike if one.stacks else row, []).append(row)
        answers: dict[int, Any] = {}
        for rows in alike.values():
            answers |= self._together(rows, [asked[row] for row in rows])
        return answers

    def _together(self, rows: list[int], asked: list[Request]) -> dict[int, Any]:
        if isinstance(asked[0], Descend):
            norms = step_all(
                [one.descent for one in asked if isinstance(one, Descend)], move_lower=asked[0].move_lower
            )
            return dict(zip(rows, norms, strict=True))
        if not asked[0].stacks or (len(rows) == 1 and not self.vectors.is_on_gpu(rows[0])):
            return {row: self._tried(row, one) for row, one in zip(rows, asked, strict=True)}
        try:
            if isinstance(asked[0], Step):
                return dict(zip(rows, self._step(rows, asked), strict=True))  # type: ignore[arg-type]
            return dict(zip(rows, self._evaluate(rows, asked), strict=True))  # type: ignore[arg-type]
        except torch.OutOfMemoryError as problem:
            full = ModelError(
                f"out of memory on {self._device} for {len(rows)} devices at once: lower fleet.at_once"
            )
            full.__cause__ = problem
            return dict.fromkeys(rows, full)
        except (ValueError, RuntimeError, IndexError, ModelError):
            # computed alone, each row raises its own error
            return {row: self._tried(row, one) for row, one in zip(rows, asked, strict=True)}

    def _tried(self, row: int, asked: Request) -> Any:
        """The answer of one row computed alone, or the exception that it raises."""
        try:
            return self._alone(row, asked)
        except Exception as fault:  # noqa: BLE001 - raised where it was asked for
            return fault

    def _alone(self, row: int, asked: Request) -> Any:
        backend = self._backend
        backend.load(self.vectors.weights_of(row))
        if isinstance(asked, Evaluation):
            return backend.evaluate(asked.x, asked.y)
        if isinstance(asked, SingleCall):
            return asked.call(backend)
        assert isinstance(asked, Step), "`_together` handles optimiser steps"
        mean = backend.step(
            asked.x,
            asked.y,
            asked.key,
            training=asked.training,
            extra_loss=asked.extra_loss,
            tensors=asked.tensors,
        )
        self.vectors.store(row, backend.weights, backend.gradient)
        return mean

    def _step(self, rows: list[int], steps: list[Step]) -> list[float]:
        first = steps[0]
        self._module.train(first.training)
        self.vectors.upload(rows)
        drawn = self._drawn(steps) if first.training else []
        wanted = [name for name in self._parameters if first.tensors is None or name in first.tensors]
        extra = None if all(one.extra_loss is None for one in steps) else [one.extra_loss for one in steps]
        given = [torch.tensor(rows), self._inputs(steps), self._targets(steps), *drawn]
        compute = partial(self._computed, self._all(rows), first.training, wanted, extra)
        if extra is None:
            alike = first.training, tuple(wanted), *((one.shape, one.dtype) for one in given)
            losses, gradients, statistics = self._watched(alike, compute, given)
        else:
            losses, gradients, statistics = compute(*(one.to(self._device) for one in given))
        if not self._all(rows):
            torch._foreach_copy_([self.vectors.torch_gradients[row] for row in rows], list(gradients))
        if first.training and statistics.shape[1]:
            places = [self.vectors.torch_weights[row, self._statistics] for row in rows]
            torch._foreach_copy_(places, list(statistics))
        self.vectors.download(rows, statistics=first.training)
        return for_numpy(losses).tolist()

    def _watched(self, alike: Hashable, compute: Compute, given: list[Tensor]) -> tuple[Tensor, ...]:
        """Compute, or replay a recorded graph. The first call checks that the computation changes no hidden
        state.
        """
        if self._is_watched or not self._cuda_graphs.enabled:
            return self._cuda_graphs.run(alike, compute, given)
        before, self._is_watched = mutable_state(self._module, self._device), True
        found = compute(*(one.to(self._device) for one in given))
        if before != mutable_state(self._module, self._device):
            self._cuda_graphs.disable()
        return found

    def _computed(
        self,
        every: bool,
        training: bool,
        wanted: list[str],
        extra: list[ExtraLoss | None] | None,
        rows: Tensor,
        x: Tensor,
        y: Tensor,
        *draws: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Losses, gradients and statistics of some rows. With all rows the gradients are written in place."""
        weights = self.vectors.torch_weights if every else self.vectors.torch_weights.index_select(0, rows)
        near = self._tensors(weights.detach())
        own = {name: near[name].requires_grad_(name in wanted) for name in self._parameters}
        statistics = {name: near[name].clone() for name in self._places if name not in own}

        def logits_of(own: Any, statistics: Any, x: Tensor, draws: list[Tensor]) -> Tensor:
            with (
                SingleValueNorms() if training and len(x) == 1 else nullcontext(),
                Dropouts(lambda index, *_: draws[index]) if draws else nullcontext(),
            ):
                logits: Tensor = functional_call(self._module, (own, statistics), (x,))
                return logits

        with autocast_to(self._backend.precision if training else "float32", self._device):
            logits = vmap(logits_of)(own, statistics, x, list(draws)).float()
        losses = self._mean_losses(logits, y)
        total = losses.sum()
        for number, extra_loss in enumerate(extra or []):
            if extra_loss is not None:
                total = total + loss_term_value(extra_loss, logits[number])
        found = (
            torch.autograd.grad(total, [own[name] for name in wanted], allow_unused=True) if wanted else ()
        )
        gradients = self.vectors.torch_gradients if every else torch.empty_like(weights)
        gradients.zero_()
        for name, gradient in zip(wanted, found, strict=True):
            if gradient is not None:
                gradients[:, self._places[name][0]] = gradient.reshape(len(x), -1)
        moved = weights[:, self._statistics].clone()
        for name, statistic in statistics.items():
            at = self._places[name][0].start - (self._statistics.start or 0)
            moved[:, at : at + statistic[0].numel()] = statistic.reshape(len(x), -1)
        return losses.detach(), gradients, moved

    def _evaluate(self, rows: list[int], asked: list[Evaluation]) -> list[tuple[float, NDArray[np.float32]]]:
        self._module.eval()
        self.vectors.upload(rows)
        with torch.no_grad():
            near = self.vectors.rows(self.vectors.torch_weights, rows)
            found = vmap(lambda own, x: functional_call(self._module, own, (x,)))(
                self._tensors(near), self._inputs(asked).to(self._device)
            )
            outputs, targets = for_numpy(found), self._targets(asked)
            return [(self._loss_sum(*one), one[0].numpy()) for one in zip(outputs, targets, strict=True)]

    def _mean_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of each row."""
        loss, section = self._task.loss, self._task.section
        if is_plain(loss, section):
            every = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            return every.view(targets.shape).mean(1)
        return torch.stack([mean_loss(loss, section, *one) for one in zip(logits, targets, strict=True)])

    def _loss_sum(self, outputs: Tensor, targets: Tensor) -> float:
        loss, section = self._task.loss, self._task.section
        if is_plain(loss, section):
            return functional.cross_entropy(outputs, targets, reduction="sum").item()
        return sample_losses(loss, section, outputs, targets).double().sum().item()

    @property
    def _parameters(self) -> list[str]:
        return [name for name, (_, tensor) in self._places.items() if tensor.kind != "stat"]

    def _all(self, rows: list[int]) -> bool:
        return len(rows) == len(self.vectors.weights)

    def _tensors(self, weights: Tensor) -> dict[str, Tensor]:
        """The tensors in the weights of some rows, by name, on the device where torch computes."""
        return {
            name: weights[:, place].reshape(len(weights), *tensor.shape)
            for name, (place, tensor) in self._places.items()
        }

    def _inputs(self, asked: Iterable[Step | Evaluation]) -> Tensor:
        return torch.from_numpy(np.stack([one.x for one in asked])).to(self._dtype)

    def _targets(self, asked: Iterable[Step | Evaluation]) -> Tensor:
        targets = [one.y for one in asked]
        if targets[0].ndim == 1 and targets[0].dtype == np.int64:
            for labels in targets:
                # a wrong label crashes the GPU's context for the whole process
                check_labels(self._spec, labels)
        return torch.from_numpy(np.stack(targets))

    def _drawn(self, steps: Collection[Step]) -> list[Tensor]:
        """The factors of each dropout layer for all steps, drawn as in every other backend."""
        return [
            torch.from_numpy(np.stack([noise.draw(step.key, index, len(step.y)) for step in steps]))
            for index, noise in enumerate(self._dropouts)
        ]

    def _dropouts_found(self) -> list[Noise]:
        found: list[Noise] = []

        def factors(index: int, shape: tuple[int, ...], p: float, num_samples: int) -> Tensor:
            assert index == len(found), "they are counted"
            found.append(Noise(shape, float(p)))
            return torch.ones(num_samples, *shape, device=self._device)

        buffers = {name: buffer.clone() for name, buffer in self._module.named_buffers()}
        self._module.train()
        with torch.no_grad(), Dropouts(factors):
            x = torch.zeros(_TRIED_SAMPLES, *self._spec.input_shape, dtype=self._dtype, device=self._device)
            try:
                functional_call(self._module, buffers, (x,))
            except (ValueError, RuntimeError, IndexError) as problem:
                raise ModelError(_line(problem)) from problem
        return found

    def check(self, x: InputArray, y: LabelArray) -> None:
        """Compare a step of two stacked rows with the same steps computed alone, on a batch of a device.

        Raises:
            ModelError: the results differ.
        """
        start = self._backend.weights.copy()
        steps = [Step(x, y, Key(row), training=True, extra_loss=None, tensors=None) for row in range(2)]

        def begin(row: int) -> None:
            self.vectors.load(start * np.float32(1 + 0.1 * row), row)

        wanted = []
        for row, step in enumerate(steps):
            begin(row)
            mean = self._alone(row, step)
            gradient, weights = self.vectors.gradient_of(row), self.vectors.weights_of(row)
            wanted.append((mean, gradient.copy(), weights.copy()))
            begin(row)
        try:
            means = self._step([0, 1], steps)
        except (ValueError, RuntimeError, IndexError) as problem:
            raise ModelError(_line(problem)) from problem
        for row, (mean, gradient, weights) in enumerate(wanted):
            ours = self.vectors.gradient_of(row), self.vectors.weights_of(row)
            pairs = ((means[row], mean), (ours[0], gradient), (ours[1], weights))
            if not all(_close(*pair) for pair in pairs):
                raise ModelError(
                    "a stacked step of several networks differs from the step of each network alone"
                )
        self._backend.load(start)


def _line(problem: Exception) -> str:
    """The first line of torch's message; the rest describes its own internals."""
    return str(problem).strip().partition("\n")[0] or type(problem).__name__


def _close(ours: Any, theirs: Any) -> bool:
    apart = float(np.linalg.norm(np.subtract(ours, theirs)))
    return apart <= _TOLERANCE * max(float(np.linalg.norm(theirs)), 1e-6)
