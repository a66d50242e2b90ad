"""A torch module as a `Backend`: its tensors are views into two flat vectors, on the processor or a card.

One thread is best on shared cores (two under contention were 4 to 70 times slower): whoever owns the
process sets `torch.set_num_threads(1)`.
"""

import copy
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from fleetune.edge_agent.training import frozen_layers
from fleetune.edge_agent.training.backend import (
    ExtraLoss,
    InputArray,
    LabelArray,
    SmallerNetwork,
    UpperLayers,
    check_labels,
)
from fleetune.edge_agent.training.flat_module import (
    InitialBuffers,
    channels_last,
    check_same,
    move_into_vectors,
)
from fleetune.edge_agent.training.gpu.cuda_graphs import CudaGraphs, mutable_state
from fleetune.edge_agent.training.gpu.flat_vectors import FlatVectors
from fleetune.edge_agent.training.gpu.gpu_descent import GpuDescent
from fleetune.edge_agent.training.gpu.torch_device import (
    PROCESSOR,
    autocast_to,
    for_numpy,
    fork_seeded,
    generator_states,
)
from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState
from fleetune.edge_agent.training.smaller_network import SmallerNetworks, is_worth_shrinking
from fleetune.edge_agent.training.torch_loss_terms import LastLayer, loss_term_value
from fleetune.protocols.bundle.bundle import Noise
from fleetune.protocols.errors import ModelError
from fleetune.protocols.method.trainer import FitPlan
from fleetune.protocols.model import architectures
from fleetune.protocols.model.backbone_file import Tensors
from fleetune.protocols.model.loss_terms import Answer
from fleetune.protocols.model.smaller import smaller_spec
from fleetune.protocols.model.spec import Backbone, FlatArray, ModelSpec
from fleetune.protocols.model.token_ids import samples_of
from fleetune.protocols.model.torch_backbone import as_described, set_frozen
from fleetune.protocols.model.torch_batch_norm import SingleValueNorms
from fleetune.protocols.model.torch_dropout import Dropouts
from fleetune.protocols.model.torch_failures import failing_part
from fleetune.protocols.randomness import Key
from fleetune.protocols.settings.device import TrainingSection
from fleetune.protocols.settings.section import Precision
from fleetune.protocols.tasks import CLASSIFICATION
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.tasks.torch_losses import is_plain, mean_loss, sample_losses
from fleetune.protocols.user_code import as_line

_TRIED = 3  # samples of a step that is only looked at


class TorchBackend:
    """See `edge_agent.training.backend.Backend`. Takes the module over: its tensors move into the flat
    vectors.

    Starts from the module's own weights. Image networks compute with the channels last, which is the
    same function and faster. `precision` is of training steps alone, see `FleetSection`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        module: nn.Module,
        task: Task = CLASSIFICATION,
        device: torch.device = PROCESSOR,
        precision: Precision = "float32",
    ) -> None:
        """Raises ModelError: the module's tensors are not the spec's, or the device cannot hold them."""
        check_same(spec, module)
        self._spec, self._module, self._task, self._device = spec, module, task, device
        self.precision = precision
        self._samples = samples_of(module, spec.input_shape)
        try:
            self._vectors = FlatVectors(spec, device)
            module.to(device)
        except RuntimeError as problem:  # no memory, or what the module has is not for it
            raise ModelError(f"device {device} cannot take model {spec.name}: {problem}") from problem
        self._parameters = move_into_vectors(spec, module, self._vectors)
        self._initial_buffers = InitialBuffers(module, device)
        self._last_layer = LastLayer(spec, module)
        self._replay: frozen_layers.Replay | None = None
        self._smaller = SmallerNetworks(self, self._make_smaller)
        self._dropouts: dict[int, Noise] | None = None  # until a step in training shows them
        self._cuda_graphs = CudaGraphs(device)
        self._channels_last = any(isinstance(part, nn.Conv2d) for part in module.modules())
        self._input_dtype = torch.int64 if self._samples.ids else torch.float32

    @classmethod
    def from_spec(
        cls,
        spec: ModelSpec,
        task: Task = CLASSIFICATION,
        frozen: Tensors = MappingProxyType({}),
        device: torch.device = PROCESSOR,
        precision: Precision = "float32",
    ) -> "TorchBackend":
        """Build the model by its name, with these frozen tensors where it has a backbone.

        Raises:
            ModelError: there is no such model here, or it differs from the fleet's.
        """
        with fork_seeded(Key(0)):  # building draws initial weights; nobody else's stream moves
            module = architectures.build(spec.name, spec.input_shape, spec.num_classes)
        as_described(spec, module)
        if isinstance(spec.backbone, Backbone):
            set_frozen(module, frozen)
        return cls(spec, module, task, device, precision)

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def task(self) -> Task:
        return self._task

    @property
    def module(self) -> nn.Module:
        """That computes; its tensors are views into the flat vectors."""
        return self._module

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    @property
    def vocabulary(self) -> int | None:
        """Of token ids, see `Backend.vocabulary`."""
        return self._samples.vocabulary if self._samples.ids else None

    @property
    def weights(self) -> FlatArray:
        return self._vectors.weights_of()

    @property
    def gradient(self) -> FlatArray:
        return self._vectors.gradient_of()

    def load(self, weights: FlatArray) -> None:
        """Copy `weights`, shape (spec.size,), into `self.weights`."""
        if weights.shape != (self._spec.size,):
            raise ModelError(f"{weights.shape} weights for model {self._spec.name} of {self._spec.size}")
        self._vectors.load(weights)
        self._initial_buffers.restart()

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
        """Forward and backward over one batch, see `Backend.step`."""
        if self._module.training is not training:
            self._module.train(training)
        self._vectors.upload()
        try:
            with SingleValueNorms() if len(y) == 1 else nullcontext():
                if extra_loss is None and self._cuda_graphs.enabled and self._dropouts is not None:
                    loss = self._step_again(x, y, key, training, tensors)
                else:
                    loss = self._step_anew(x, y, key, training, extra_loss, tensors)
        except (ValueError, RuntimeError, IndexError) as problem:  # torch names a bad batch by any of these
            raise ModelError(
                f"model {self._spec.name} cannot train on a batch of {len(y)}: {problem}"
            ) from problem
        self._vectors.download(statistics=training)
        return loss.item()

    def _step_anew(
        self,
        x: InputArray,
        y: LabelArray,
        key: Key,
        training: bool,
        extra_loss: ExtraLoss | None,
        tensors: Collection[str] | None,
    ) -> Tensor:
        self._vectors.torch_gradients.zero_()
        with fork_seeded(key, self._device), self._wanting(tensors), self._last_layer.watched() as calls:
            before = mutable_state(self._module, self._device) if self._cuda_graphs.enabled else []
            with autocast_to(self.precision if training else "float32", self._device):
                logits = (self._trained_on(x, key) if training else self._logits(x)).float()
            if self._cuda_graphs.enabled and before != mutable_state(self._module, self._device):
                self._cuda_graphs.disable()
            loss = mean_loss(self._task.loss, self._task.section, logits, self._targets(y))
            total = loss
            if extra_loss is not None:
                of_logits = extra_loss.loss_term.answer == "logits"
                own = logits if of_logits else self._last_layer.features(calls)
                total = loss + loss_term_value(extra_loss, own)
            if total.requires_grad:
                total.backward()  # type: ignore[no-untyped-call]
        return loss

    def _step_again(
        self,
        x: InputArray,
        y: LabelArray,
        key: Key,
        training: bool,
        tensors: Collection[str] | None,
    ) -> Tensor:
        """The same, by what the card was shown of a step like this one."""
        self._check_labels(y)
        dropouts = self._dropouts if training and self._dropouts is not None else {}
        drawn = [noise.draw(key, index, len(y)) for index, noise in dropouts.items()]
        wanted = [name for name in self._parameters if tensors is None or name in tensors]

        def compute(x: Tensor, y: Tensor, *drawn: Tensor) -> tuple[Tensor]:
            self._vectors.torch_gradients.zero_()
            dropping = Dropouts(lambda index, *_: drawn[index]) if drawn else nullcontext()
            with dropping, autocast_to(self.precision if training else "float32", self._device):
                logits = self._module(self._shaped(x)).float()
            loss = mean_loss(self._task.loss, self._task.section, logits, y)
            parameters = [self._parameters[name] for name in wanted]
            found = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
            for parameter, gradient in zip(parameters, found, strict=True):
                if parameter.grad is not None and gradient is not None:
                    parameter.grad.copy_(gradient)
            return (loss.detach(),)

        given = [torch.from_numpy(one) for one in (x, y, *drawn)]
        alike = training, tuple(wanted), *((one.shape, one.dtype) for one in given)
        (loss,) = self._cuda_graphs.run(alike, compute, given)
        return loss

    def gpu_descent(
        self, settings: TrainingSection, plan: FitPlan, before: OptimiserState | None
    ) -> GpuDescent | None:
        """See `Backend.gpu_descent`; on a card."""
        if not self._vectors.on_gpu:
            return None
        return GpuDescent(self._vectors, 0, self._spec.num_parameters, settings, plan, before)

    def evaluate(self, x: InputArray, y: LabelArray) -> tuple[float, NDArray[np.float32]]:
        """Sum of losses and outputs, see `Backend.evaluate`."""
        with self._answering(x):
            outputs, targets = self._logits(x), self._targets(y)
            if is_plain(self._task.loss, self._task.section):
                total = functional.cross_entropy(outputs, targets, reduction="sum")
            else:
                total = self._sample_losses(outputs, targets).sum()
            return total.item(), for_numpy(outputs).numpy()

    def losses(self, x: InputArray, y: LabelArray) -> NDArray[np.float64]:
        """Each sample's loss, see `Backend.losses`."""
        with self._answering(x):
            found: NDArray[np.float64] = self._sample_losses(self._logits(x), self._targets(y)).numpy()
        return found

    def _sample_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return for_numpy(sample_losses(self._task.loss, self._task.section, outputs, targets)).double()

    def answer(self, x: InputArray, what: Answer) -> NDArray[np.float32]:
        """What the model gives, or gives its last layer, see `Backend.answer`."""
        with self._answering(x), self._last_layer.watched() as calls:
            logits = self._logits(x)
            answer = for_numpy(logits if what == "logits" else self._last_layer.features(calls))
            array: NDArray[np.float32] = answer.numpy()
            return array

    @contextmanager
    def _answering(self, x: InputArray) -> Iterator[None]:
        """The model evaluates inside; what torch raises becomes a ModelError that names the module."""
        self._module.eval()
        self._vectors.upload()
        try:
            with torch.inference_mode():
                yield
        except (ValueError, RuntimeError, IndexError, TypeError) as problem:
            where, why = self._failing_part(x) or ("the model itself", as_line(problem))
            raise ModelError(
                f"model {self._spec.name} cannot evaluate a batch of {len(x)}: {where}: {why}; batches have"
                " any size from 1 on"
            ) from problem

    def _failing_part(self, x: InputArray) -> tuple[str, str] | None:
        if self._replay is not None:
            return None
        with torch.no_grad():
            return failing_part(self._module, self._input(x))

    def _targets(self, y: LabelArray) -> Tensor:
        self._check_labels(y)
        return torch.from_numpy(y).to(self._device)

    def _check_labels(self, y: LabelArray) -> None:
        if self._device != PROCESSOR and y.ndim == 1 and y.dtype == np.int64:
            check_labels(self._spec, y)  # a card does not survive a wrong one

    def _trained_on(self, x: InputArray, key: Key) -> Tensor:
        """The logits in training; what dropout drops is the same as with every other backend."""
        if self._dropouts == {}:
            return self._logits(x)
        dropouts = {}

        def factors(index: int, shape: tuple[int, ...], p: float, num_samples: int) -> Tensor:
            dropouts[index] = noise = Noise(shape, float(p))
            return torch.from_numpy(noise.draw(key, index, num_samples)).to(self._device)

        with Dropouts(factors):
            logits = self._logits(x)
        self._dropouts = dropouts
        return logits

    @contextmanager
    def _wanting(self, tensors: Collection[str] | None) -> Iterator[None]:
        """Autograd computes no other parameters' gradients, and nothing that only they would need."""
        others = [] if tensors is None else [p for name, p in self._parameters.items() if name not in tensors]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def upper_layers(self) -> UpperLayers | None:
        """See `Backend.upper_layers`; the module's calls are watched for it."""
        if not self._spec.frozen or self._replay is not None or self._task.targets_are_samples:
            return None
        replay = frozen_layers.record_boundary(self._module, self._made_up)
        if replay is None:
            return None
        upper = copy.copy(self)
        upper._cuda_graphs, upper._replay = CudaGraphs(PROCESSOR), replay  # noqa: SLF001 - of this class
        return UpperLayers(
            upper, replay.size, lambda x: replay.compute_features(self._module, self._input(x))
        )

    def smaller_network(self, counts: tuple[int, ...]) -> SmallerNetwork | None:
        """See `Backend.smaller_network`: a copy of the module with smaller tensors."""
        return self._smaller.of(counts)

    def _make_smaller(self, counts: tuple[int, ...]) -> "TorchBackend | None":
        spec = smaller_spec(self._spec, counts)
        if (
            spec is None or not is_worth_shrinking(self._spec) or self._draws()
        ):  # what is drawn goes by shapes
            return None
        shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
        copies: dict[int, Any] = {}
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            if name in shapes:
                value = torch.zeros(shapes[name], device=self._device)
                copies[id(tensor)] = nn.Parameter(value) if isinstance(tensor, nn.Parameter) else value
        try:
            smaller = copy.deepcopy(self._module, copies)
            return TorchBackend(spec, smaller, self._task, self._device, self.precision)
        except Exception:  # noqa: BLE001 - a user's module may raise anything
            return None

    def _draws(self) -> bool:
        """Whether a step in training draws random numbers."""
        self._module.train()
        with fork_seeded(Key(0), self._device), torch.no_grad():
            before = generator_states(self._device)
            try:
                self._trained_on(for_numpy(self._made_up(_TRIED)).numpy(), Key(0))
            except (ValueError, RuntimeError, IndexError):  # as in `step`; a batch like this one
                return True
            return bool(self._dropouts) or before != generator_states(self._device)

    def _made_up(self, num_samples: int) -> Tensor:
        """Samples of numbers between -1 and 1, or of the first token id."""
        numbers = torch.arange(num_samples * math.prod(self._spec.input_shape)).reshape(
            num_samples, *self._spec.input_shape
        )
        return self._input((numbers.sin() if not self._samples.ids else 0 * numbers).numpy())

    def _logits(self, x: InputArray) -> Tensor:
        """What the module gives for samples, or where it is only the upper part, for features."""
        if self._replay is None:
            return self._checked(self._module(self._input(x)), len(x))
        try:
            return self._checked(self._replay.forward(self._module, np.asarray(x, np.float32)), len(x))
        except frozen_layers.ReplayDiffers:
            raise ModelError(
                f"model {self._spec.name}: what it calls depends on its samples, so its frozen part cannot be"
                " left out of a step; let it call the same functions for all"
            ) from None

    def _checked(self, logits: Tensor, num_samples: int) -> Tensor:
        """Raises ModelError: they are not one row a sample."""
        wanted = num_samples, self._spec.num_classes
        if logits.shape != wanted:
            raise ModelError(
                f"model {self._spec.name} gives {tuple(logits.shape)} for a batch of {num_samples}; make it"
                f" {wanted}: write flatten(1) where it calls squeeze()"
            )
        return logits

    def _input(self, x: InputArray) -> Tensor:
        return self._shaped(torch.from_numpy(x))

    def _shaped(self, x: Tensor) -> Tensor:
        inputs = x.to(self._device, self._input_dtype)
        return channels_last(inputs) if self._channels_last and inputs.ndim == 4 else inputs
