"""Trains a sub-model as a smaller network: gathers its entries, trains them, and writes them back.

A sub-model has zeros outside its neurons, and these stay 0 (see `FitPlan.neurons`). So a network of these
neurons alone computes the same in less time. A user's model may be any function, so this is tested once for
each size: both networks take two steps from synthetic weights. If losses, gradients or statistics differ by
more than rounding, training masks the whole model instead.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fleetune.edge_agent.training.backend import Backend, InputArray, LabelArray, SmallerNetwork
from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState
from fleetune.edge_agent.training.optimisers.optimiser_states import RoundOptimiserStates
from fleetune.protocols.errors import ModelError, PacketError
from fleetune.protocols.method.trainer import Fit, FitPlan, Pull
from fleetune.protocols.model.compute_cost import step_products
from fleetune.protocols.model.smaller import has_smaller
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.selection import neuron_mask

MAX_SIZES = 10  # smaller networks that are kept; devices of a simulated fleet may have every possible ratio

TORCH_LEAST_PRODUCTS = 1_500_000
_SAMPLES = 4  # samples of the steps that are compared
_MOST = 1e-3  # relative difference: rounding causes about 1e-6, another function 0.1 or more

Counts = tuple[int, ...]  # number of neurons in each group


def is_worth_shrinking(spec: ModelSpec) -> bool:
    """True if a smaller network saves time with torch.

    In small models the overhead of torch's calls dominates. LeNet-5 (0.8 million multiplications a sample)
    was less than 1.3 times faster at p = 0.4, har-cnn (2.5 million) more (docs/ratios.md).
    """
    return step_products(spec) >= TORCH_LEAST_PRODUCTS


class SmallerNetworks:
    """A cache of smaller networks by their numbers of neurons.

    Args:
        whole: backend of the whole model.
        build: returns a backend with at least so many neurons; None if there is none.
    """

    def __init__(self, whole: Backend, build: Callable[[Counts], Backend | None]) -> None:
        self._whole, self._build = whole, build
        self._found: OrderedDict[Counts, SmallerNetwork | None] = OrderedDict()

    def of(self, counts: Counts) -> SmallerNetwork | None:
        """Return the smaller network with this many neurons, see `Backend.smaller_network`."""
        if not has_smaller(self._whole.spec) or not all(counts) or counts == self._whole.spec.groups:
            return None
        if counts not in self._found:
            self._found[counts] = self._made(counts)
            while len(self._found) > MAX_SIZES:
                self._found.popitem(last=False)
        self._found.move_to_end(counts)
        return self._found[counts]

    def _made(self, counts: Counts) -> SmallerNetwork | None:
        try:
            backend = self._build(counts)
            fading = None if backend is None else _fading_if_same(self._whole, backend)
        except (ModelError, PacketError):
            return None
        return None if backend is None or fading is None else SmallerNetwork(backend, fading)


def _fading_if_same(whole: Backend, smaller: Backend) -> dict[str, float] | None:
    """Return factors by which absent neurons' statistics fade; None if the smaller backend computes
    differently.

    Raises:
        ModelError: one of the backends cannot take such steps.
    """
    spec = whole.spec
    groups = zip(spec.groups, smaller.spec.groups, strict=True)
    present = neuron_mask(spec, [np.arange(size) < few for size, few in groups], statistics=True)
    weights, size = _synthetic_weights(spec), spec.num_parameters
    weights[:size] *= present[:size]
    losses, *statistics = _two_steps(whole, weights)
    gradient = whole.gradient[present]
    other_losses, *others = _two_steps(smaller, weights[present])
    pairs = [(one[present[size:]], other) for one, other in zip(statistics, others, strict=True)]
    pairs += [(losses, other_losses), (gradient, smaller.gradient)]
    if not all(_alike(one, other) for one, other in pairs):
        return None
    return _fading(spec, ~present[size:], weights[size:], *statistics)


def _two_steps(backend: Backend, weights: FlatArray) -> list[FlatArray]:
    """Return losses, and the running statistics after each of two steps.

    The backend's gradient is then that of the second step.
    """
    backend.load(weights)
    x, y = _synthetic_samples(backend)
    losses, after = [], []
    for step in range(2):
        losses.append(backend.step(x, y, Key(step)))
        after.append(backend.weights[backend.spec.num_parameters :].copy())
    return [np.array(losses, np.float32), *after]


def _alike(one: FlatArray, other: FlatArray) -> bool:
    size, difference = np.linalg.norm(one), np.linalg.norm(one - other)
    return bool(np.isfinite(size) and difference <= _MOST * size)


def _fading(
    spec: ModelSpec, absent: MaskArray, before: FlatArray, once: FlatArray, twice: FlatArray
) -> dict[str, float] | None:
    """Return factors by which absent neurons' running statistics fade in a step.

    They are derived from the statistics before, after one step, and after two.

    Returns:
        The factors; None if absent neurons' statistics do not just fade.
    """
    found = {}
    for tensor in spec.tensors:
        if tensor.kind != "stat":
            continue
        where = spec.slices[tensor.name]
        here = slice(where.start - spec.num_parameters, where.stop - spec.num_parameters)
        at = np.flatnonzero(absent[here]) + here.start
        if at.size:
            factor = round(float(np.median(once[at].astype(np.float64) / before[at])), 6)
            faded = before[at] * factor, before[at] * factor**2
            if not (_alike(faded[0], once[at]) and _alike(faded[1], twice[at])):
                return None
            found[tensor.name] = factor
    return found


def _synthetic_weights(spec: ModelSpec) -> FlatArray:
    """Return weights of usual sizes, none of them 0, with positive variances."""
    draw, weights = Key.of("smaller network").generator(), np.zeros(spec.size, np.float32)
    for tensor, view in spec.views(weights):
        inputs = math.prod(tensor.shape[1:]) if tensor.kind == "weight" else 1
        draw.standard_normal(dtype=np.float32, out=view)
        if tensor.kind == "weight":
            np.divide(view, math.sqrt(inputs), out=view)
        else:
            np.abs(view, out=view)
            np.add(view, 0.5, out=view)
    return weights


def _synthetic_samples(backend: Backend) -> tuple[InputArray, LabelArray]:
    spec, draw = backend.spec, Key.of("smaller network", "samples").generator()
    shape = (_SAMPLES, *spec.input_shape)
    normal = draw.standard_normal(shape).astype(np.float32)
    x: InputArray = spec.reads.valid(normal) if spec.reads.inputs else normal
    if backend.vocabulary is not None:
        x = draw.integers(0, backend.vocabulary, shape)
    target = backend.task.target_shape(spec.num_classes, spec.input_shape)
    if target == ():
        return x, draw.integers(0, spec.num_classes, _SAMPLES)
    return x, draw.integers(0, 2, (_SAMPLES, *target)).astype(np.float32)


@dataclass(frozen=True)
class SubModel:
    """A device's sub-model as a network of its own.

    Attributes:
        network: computes the sub-model.
        present: True at the entries of the whole vector that it has, shape (whole.size,).
        whole: description of the whole model.
    """

    network: SmallerNetwork
    present: MaskArray
    whole: ModelSpec

    def taken(self, vector: FlatArray) -> FlatArray:
        """Return the sub-model's entries of a whole vector."""
        return vector[self.present]

    def plan(self, plan: FitPlan) -> FitPlan:
        """Return the same plan for the smaller network."""
        assert plan.trainable is not None, "a present entry is missing from the sub-model"
        trainable, pull = plan.trainable[self.present], plan.pull
        spec = self.network.backend.spec
        if pull is not None:
            mask = None if pull.mask is None else pull.mask[self.present]
            pull = Pull(self.taken(pull.target), pull.strength, mask)
        whole = bool(trainable[: spec.num_parameters].all())
        return replace(plan, trainable=None if whole else trainable, pull=pull, neurons=None)

    def states(self, states: RoundOptimiserStates | None) -> RoundOptimiserStates | None:
        """Return the optimiser's states for the smaller network."""
        return None if states is None else _SubModelStates(states, self)

    def put_back(self, fit: Fit, weights: FlatArray) -> Fit:
        """Return the result that masked training of the whole model from `weights` would have had."""
        after = weights.copy()
        for name, factor in self.network.fading.items():
            after[self.whole.slices[name]] *= np.float32(factor**fit.num_steps)
        after[self.present] = fit.weights
        return replace(fit, weights=after)


def sub_model_of(backend: Backend, weights: FlatArray, plan: FitPlan) -> SubModel | None:
    """Return the network that trains the same as this plan; None if the plan needs masked training."""
    if plan.neurons is None or plan.trainable is None or plan.lower:
        return None
    if plan.loss_term or plan.keep_last_gradient:
        return None
    spec, size = backend.spec, backend.spec.num_parameters
    active = plan.neurons.by_group(spec)
    network = backend.smaller_network(tuple(int(np.count_nonzero(group)) for group in active))
    if network is None:
        return None
    wanted = network.backend.spec.groups
    padded = [_padded(group, count) for group, count in zip(active, wanted, strict=True)]
    present = neuron_mask(spec, padded, statistics=True)
    outside = ~present[:size]
    if (outside & (weights[:size] != 0)).any() or (outside & plan.trainable[:size]).any():
        return None
    return SubModel(network, present, spec)


def _padded(active: MaskArray, count: int) -> MaskArray:
    """Return `active` with the first absent neurons added up to `count` neurons. Their weights stay 0."""
    padded = active.copy()
    padded[np.flatnonzero(~active)[: count - np.count_nonzero(active)]] = True
    return padded


class _SubModelStates(RoundOptimiserStates):
    """The optimiser's states of a sub-model, stored in those of the whole model."""

    def __init__(self, whole: RoundOptimiserStates, part: SubModel) -> None:
        super().__init__(())
        self._whole, self._size = whole, part.whole.num_parameters
        self._present = part.present[: self._size]
        self._started = OptimiserState(())

    def next(self) -> OptimiserState:
        """Return the state from which the round's next local training starts."""
        self._started = self._whole.next()
        return OptimiserState(tuple(vector[self._present] for vector in self._started.vectors))

    def put(self, state: OptimiserState) -> None:
        """Store the state after that local training. All other entries stay unchanged."""
        vectors = []
        for number, new in enumerate(state.vectors):
            started = self._started.vectors
            whole = started[number].copy() if started else np.zeros(self._size, np.float32)
            whole[self._present] = new
            vectors.append(whole)
        self._whole.put(OptimiserState(tuple(vectors)))
