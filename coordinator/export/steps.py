"""The functions that are traced: a training step, a training step with an added loss term, and evaluation."""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fleetune.coordinator.export.module_paths import Paths
from fleetune.coordinator.export.primitives import Cumulative, Primitives, is_cumulative
from fleetune.coordinator.export.torch_trace import SIZES
from fleetune.protocols.bundle.bundle import (
    ANSWER,
    CONTRAST,
    DISTILLATION,
    LOSSES,
    TRAIN,
)
from fleetune.protocols.errors import ModelError
from fleetune.protocols.model.noise import Noise
from fleetune.protocols.model.spec import Dimensions, ModelSpec
from fleetune.protocols.model.token_ids import Samples, samples_of
from fleetune.protocols.model.torch_backbone import is_frozen, is_statistic, last_layer
from fleetune.protocols.model.torch_draws import GivenDraws
from fleetune.protocols.model.torch_loss_terms import contrast, distillation
from fleetune.protocols.randomness import Key
from fleetune.protocols.tasks import CLASSIFICATION
from fleetune.protocols.tasks.task import Task
from fleetune.protocols.tasks.torch_losses import mean_loss, sample_losses
from fleetune.protocols.user_code import as_line, running_model

_RESERVED = frozenset(
    "x y loss losses logits features batches teacher near far strength temperature".split()  # noqa: SIM905
)
Tensors = Mapping[str, Tensor]
TRAINING = (TRAIN, DISTILLATION, CONTRAST)  # graphs that run the module in training mode
BATCHES = (
    "batches"  # training steps, this one included: of models whose statistics are means over all batches
)


@dataclass(frozen=True)
class Model:
    """A module that is prepared for tracing.

    Attributes:
        spec: the description of the model.
        module: a copy of the module, without the batch counters of its norms.
        noises: the random numbers that it takes in training.
        samples: the kind of samples that the module takes.
        num_features: the number of inputs of its last layer for a sample; None if they are not one tensor.
        cumulative: True if some running statistics are means over all batches.
        task: the task whose loss is traced.
    """

    spec: ModelSpec
    module: nn.Module
    noises: tuple[Noise, ...]
    samples: Samples
    num_features: int | None
    cumulative: bool
    task: Task = CLASSIFICATION

    @property
    def sample_type(self) -> torch.dtype:
        return torch.int64 if self.samples.ids else torch.float32


@dataclass
class Watched:
    """What was observed during one forward pass.

    Attributes:
        draws: the random numbers that it took, each with the path of the module that drew them.
        features: the arguments of each call of the last layer.
    """

    draws: list[tuple[Noise, str]] = field(default_factory=list)
    features: list[Any] = field(default_factory=list)


def prepare(spec: ModelSpec, module: nn.Module, task: Task = CLASSIFICATION) -> Model:
    """Copy a module for tracing, and record its random draws and features in forward passes.

    Raises:
        ModelError: the module cannot train on batches, or draws random numbers in evaluation.
    """
    names = [*(tensor.name for tensor in spec.tensors), *frozen_shapes(spec)]
    taken = [name for name in names if name in _RESERVED or name.isdigit()]
    if taken:
        raise ModelError(
            f"model {spec.name!r} cannot be exported: graphs reserve the name of its tensor {taken[0]!r};"
            " rename the tensor"
        )
    module = copied(spec.name, module).train()
    cumulative = False
    for part in module.modules():
        if is_cumulative(part) and not is_frozen(part):
            cumulative = True
            part.momentum = Cumulative()  # type: ignore[assignment]
        if getattr(part, "num_batches_tracked", None) is not None:
            part.num_batches_tracked = None  # type: ignore[assignment]
    samples = samples_of(module, spec.input_shape)
    model = Model(spec, module, (), samples, None, cumulative, task)
    with running_model(spec.name, "cannot be exported, it does not run in training on 3 and 5 samples"):
        few, many = (_watch(model, num_samples) for num_samples in SIZES)
        evaluated = _watch(model, SIZES[0], training=False)
    if evaluated.draws:
        noise, path = evaluated.draws[0]
        raise ModelError(
            f"model {spec.name!r} cannot be exported: {path or 'the model itself'} draws random numbers"
            f" ({noise.kind}) in evaluation; draw them only while self.training is True, for example with"
            " functional.dropout(x, p, self.training)"
        )
    noises = _for_any_batch(spec.name, few.draws, many.draws)
    return Model(spec, module, noises, samples, _features_shape(few.features), cumulative, task)


def _for_any_batch(
    name: str, few: Sequence[tuple[Noise, str]], many: Sequence[tuple[Noise, str]]
) -> tuple[Noise, ...]:
    """Return the draws for any number of samples, from the draws for two numbers.

    Draws fill their arrays in C order, so a draw with the samples on another axis than the first becomes one
    of the same size with the samples first.
    """
    found = []
    for (noise, path), (other, _) in zip(few, many, strict=False):
        size, larger = math.prod(noise.sizes(0)), math.prod(other.sizes(0))
        shape: Dimensions = noise.shape
        if shape != other.shape:
            samples_first = (noise.shape[:1] + other.shape[:1], noise.shape[1:]) == (SIZES, other.shape[1:])
            shape = ("n", *noise.shape[1:]) if samples_first else ("n", size // SIZES[0])
        made = Noise(shape, noise.p, noise.kind)
        sizes = [math.prod(made.sizes(num_samples)) for num_samples in SIZES]
        if sizes != [size, larger] or (noise.p, noise.kind) != (other.p, other.kind):
            raise ModelError(
                f"model {name!r} cannot be exported: {path or 'the model itself'} draws random numbers of"
                f" shape {noise.shape} for {SIZES[0]} samples and {other.shape} for {SIZES[1]}; agents with"
                " torch can train it"
            )
        found.append(made)
    if len(few) != len(many):
        raise ModelError(
            f"model {name!r} cannot be exported: it draws random numbers {len(few)} times for {SIZES[0]}"
            f" samples and {len(many)} times for {SIZES[1]}; agents with torch can train it"
        )
    return tuple(found)


def copied(name: str, module: nn.Module) -> nn.Module:
    """Return a copy of a module.

    Raises:
        ModelError: torch cannot copy the module.
    """
    # torch copies no computed tensors, such as the weight that `torch.nn.utils.weight_norm` computes anew in
    # each forward pass
    computed = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        return copy.deepcopy(module, computed)
    except Exception as problem:  # a user's module may refuse it in any way
        raise ModelError(
            f"model {name!r} cannot be exported, because torch cannot copy it: {as_line(problem)}; let agents"
            " with torch train it"
        ) from problem


def frozen_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the backbone's tensors, by name."""
    return {tensor.name: tensor.shape for tensor in spec.frozen}


def inputs(model: Model, graph: str, num_samples: int) -> dict[str, Tensor]:
    """Return zeros for each input of a graph, by name in the graph's order."""
    tensors = {tensor.name: torch.zeros(tensor.shape) for tensor in model.spec.tensors}
    tensors |= {name: torch.zeros(shape) for name, shape in frozen_shapes(model.spec).items()}
    floats: dict[str, tuple[int, ...]] = {}
    if graph in TRAINING:
        floats |= {f"noise:{index}": noise.sizes(num_samples) for index, noise in enumerate(model.noises)}
        floats |= {BATCHES: ()} if model.cumulative else {}
    if graph == DISTILLATION:
        floats["teacher"] = (num_samples, model.spec.num_classes)
    if graph == CONTRAST:
        floats["near"] = floats["far"] = (num_samples, model.num_features or 0)
    if graph in (DISTILLATION, CONTRAST):
        floats |= {"strength": (), "temperature": ()}
    found = {"x": torch.zeros(num_samples, *model.spec.input_shape, dtype=model.sample_type)}
    if graph != ANSWER:
        wanted = model.task.target_shape(model.spec.num_classes, model.spec.input_shape)
        found["y"] = torch.zeros(num_samples, *wanted, dtype=torch.float32 if wanted else torch.int64)
    return tensors | found | {name: torch.zeros(shape) for name, shape in floats.items()}


def step(
    model: Model, graphs: Collection[str], watch: Callable[[Tensor], None]
) -> Callable[[Tensors], dict[str, dict[str, Tensor]]]:
    """Return the function that graphs of one mode compute, from inputs by name to outputs by graph and name.

    The graphs share one forward pass. The function calls `watch` with each loss before its backward pass.
    """
    trained = [tensor.name for tensor in model.spec.tensors if tensor.kind != "stat"]

    def run(given: Tensors) -> dict[str, dict[str, Tensor]]:
        leaves = given
        if not {ANSWER, LOSSES}.issuperset(graphs):
            leaves = {name: given[name].detach().requires_grad_() for name in trained}
        training = not set(graphs).isdisjoint(TRAINING)
        logits, features, primitives = _forward(model, given, leaves, training=training)
        found: dict[str, dict[str, Tensor]] = {}
        for graph in graphs:
            if graph == ANSWER:
                found[graph] = {"logits": logits} | ({} if features is None else {"features": features})
            elif graph == LOSSES:
                losses = sample_losses(model.task.loss, model.task.section, logits, given["y"])
                found[graph] = {"losses": losses}
            else:
                with primitives:
                    loss, total = _losses(model, graph, given, logits, features)
                watch(total)
                gradients = torch.autograd.grad(
                    total, [leaves[name] for name in trained], retain_graph=True, allow_unused=True
                )
                found[graph] = {"loss": loss}
                for name, gradient in zip(trained, gradients, strict=True):
                    found[graph][f"gradient:{name}"] = (
                        torch.zeros_like(given[name]) if gradient is None else gradient
                    )
                found[graph] |= {f"statistic:{name}": value for name, value in primitives.new.items()}
        return found

    return run


def _losses(
    model: Model, graph: str, given: Tensors, logits: Tensor, features: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the mean loss, and the sum of all terms, whose gradient the graph computes."""
    loss = total = mean_loss(model.task.loss, model.task.section, logits, given["y"])
    if graph == DISTILLATION:
        total = loss + distillation(logits, given["teacher"], given["strength"], given["temperature"])
    if graph == CONTRAST:
        assert features is not None
        total = loss + contrast(
            features, given["near"], given["far"], given["strength"], given["temperature"]
        )
    return loss, total


def _forward(
    model: Model, given: Tensors, leaves: Tensors, *, training: bool
) -> tuple[Tensor, Tensor | None, Primitives]:
    """Return logits, features if the model has them, and the context that recorded the new statistics."""
    tensors = {tensor.name: leaves.get(tensor.name, given[tensor.name]) for tensor in model.spec.tensors}
    own = dict(model.module.named_buffers())
    for name in frozen_shapes(model.spec):  # buffers of integers are sent as float32
        tensors[name] = given[name].to(own[name].dtype) if name in own else given[name]
    statistics = {tensor.name: tensors[tensor.name] for tensor in model.spec.tensors if tensor.kind == "stat"}
    primitives = Primitives(statistics, given.get(BATCHES))
    model.module.train(training)

    def numbers(index: int, _: Noise) -> Tensor:
        return given[f"noise:{index}"]

    with (
        sdpa_kernel(SDPBackend.MATH),
        primitives,
        GivenDraws(numbers, in_place=False) if training else nullcontext(),
        features_watched(model) as calls,
    ):
        logits = functional_call(model.module, tensors, (given["x"],))
    return logits, None if model.num_features is None else calls[0][0].flatten(1), primitives


@contextmanager
def features_watched(model: Model) -> Iterator[list[Any]]:
    """Yield a list that collects the arguments of every call of the last layer with weights."""
    calls, last = list[Any](), last_layer(model.spec, model.module)
    hook = model.module.get_submodule(last).register_forward_pre_hook(
        lambda _, arguments: calls.append(arguments)
    )
    try:
        yield calls
    finally:
        hook.remove()


def _features_shape(calls: list[Any]) -> int | None:
    if len(calls) == 1 and len(calls[0]) == 1 and isinstance(calls[0][0], Tensor):
        return int(calls[0][0].flatten(1).shape[1])
    return None


def _watch(model: Model, num_samples: int, *, training: bool = True) -> Watched:
    """Run one forward pass over zeros, and return what it showed."""
    watched, paths = Watched(), Paths(model.module)

    def numbers(index: int, noise: Noise) -> Tensor:
        watched.draws.append((noise, paths.current))
        return torch.from_numpy(noise.draw(Key(0), index, num_samples))

    x = torch.zeros(num_samples, *model.spec.input_shape, dtype=model.sample_type)
    model.module.train(training)
    before = _buffers(model.module)
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            Primitives({}, torch.ones(())),
            paths,
            GivenDraws(numbers),
            features_watched(model) as calls,
        ):
            model.module(x)
    except (ValueError, RuntimeError, IndexError, TypeError) as problem:
        line = " ".join(str(problem).split())
        work = "train on" if training else "evaluate"
        raise ModelError(
            f"model {model.spec.name!r} cannot {work} {num_samples} samples: {line}"
        ) from problem
    after = _buffers(model.module)
    if changed := next((name for name in before if after.get(name) != before[name]), None):
        path = changed.rpartition(".")[0]
        kind = type(model.module.get_submodule(path)).__name__
        raise ModelError(
            f"model {model.spec.name!r} cannot be exported: {path or 'the model itself'} ({kind}) changes its"
            f" buffer {changed} while it trains, and a graph cannot store that; agents with torch can train"
            " it"
        )
    watched.features = calls
    return watched


def _buffers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return tensor id and number of writes of each buffer that is not a running statistic, by name."""
    return {
        name: (id(buffer), buffer._version)  # noqa: SLF001 - torch has no other sign of it
        for name, buffer in module.named_buffers()
        if not is_statistic(module, name)
    }
