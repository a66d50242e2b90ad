"""Training a sub-model as the smaller network that it is: gathered, trained by the same loop, put back.

A sub-model has zeros outside its neurons, and they stay (see `FitPlan.neurons`). Then the network of these
neurons alone computes the same in less time. Whether it does is not taken on trust, as a model may be any
function of a user's: once for each size, both take two steps from made-up weights, and where losses,
gradients or statistics differ by more than rounding, or there is no smaller network, training masks.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fleetune.edge_agent.training.backend import Backend, InputArray, LabelArray, Smaller
from fleetune.edge_agent.training.optimisers.kept_states import KeptStates
from fleetune.edge_agent.training.optimisers.optimiser import OptimiserState
from fleetune.protocols.errors import ModelError, PacketError
from fleetune.protocols.model.compute_cost import step_products
from fleetune.protocols.model.smaller import has_smaller
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.skeletons.trainer import Fit, FitPlan, Pull
from fleetune.protocols.update.selection import neuron_positions

MAX_SIZES = 10  # of smaller networks that are kept: a simulated fleet's devices may have each ratio there is

TORCH_LEAST_PRODUCTS = 1_500_000
_SAMPLES = 4  # of the steps that are compared
_MOST = 1e-3  # relative difference: rounding makes 1e-6 of it, another function 0.1 and more

Counts = tuple[int, ...]  # neurons of each group


def torch_gains(spec: ModelSpec) -> bool:
    """Whether torch's calls do not set the time already: on LeNet-5 (0.8 million multiplications a sample) a
    smaller network gained less than 1.3 times at p = 0.4, on har-cnn (2.5 million) more (docs/ratios.md).
    """
    return step_products(spec) >= TORCH_LEAST_PRODUCTS


class SmallerNetworks:
    """Smaller networks of a backend's, by how many neurons they have.

    Args:
        whole: the backend.
        build: of a backend with so many neurons, or a few more; None: there is none.
    """

    def __init__(self, whole: Backend, build: Callable[[Counts], Backend | None]) -> None:
        self._whole, self._build = whole, build
        self._found: OrderedDict[Counts, Smaller | None] = OrderedDict()

    def of(self, counts: Counts) -> Smaller | None:
        """See `Backend.smaller`."""
        if not has_smaller(self._whole.spec) or not all(counts) or counts == self._whole.spec.groups:
            return None
        if counts not in self._found:
            self._found[counts] = self._made(counts)
            while len(self._found) > MAX_SIZES:
                self._found.popitem(last=False)
        self._found.move_to_end(counts)
        return self._found[counts]

    def _made(self, counts: Counts) -> Smaller | None:
        try:
            backend = self._build(counts)
            fading = None if backend is None else _fading_if_same(self._whole, backend)
        except (ModelError, PacketError):
            return None
        return None if backend is None or fading is None else Smaller(backend, fading)


def _fading_if_same(whole: Backend, smaller: Backend) -> dict[str, float] | None:
    """What is to be known of absent neurons' statistics; None: the smaller backend computes something else.

    Raises:
        ModelError: one of both cannot take such steps.
    """
    spec = whole.spec
    groups = zip(spec.groups, smaller.spec.groups, strict=True)
    present = np.zeros(spec.size, bool)
    present[neuron_positions(spec, [np.arange(size) < few for size, few in groups])] = True
    weights = _made_up_weights(spec)
    weights[: spec.num_parameters] *= present[: spec.num_parameters]
    losses, *ours = _two_steps(whole, weights)
    other_losses, *theirs = _two_steps(smaller, weights[present])
    pairs = zip(ours, theirs, strict=True)
    if _alike(losses, other_losses) and all(_alike(one[present], other) for one, other in pairs):
        return _fading(spec, ~present, weights, *ours[1:])
    return None


def _two_steps(backend: Backend, weights: FlatArray) -> list[FlatArray]:
    """Losses, the last gradient, and the weights after each step, which moves their statistics."""
    backend.load(weights)
    x, y = _made_up_samples(backend)
    losses, after = [], []
    for step in range(2):
        losses.append(backend.step(x, y, Key(step)))
        after.append(backend.weights.copy())
    return [np.array(losses, np.float32), backend.gradient.copy(), *after]


def _alike(one: FlatArray, other: FlatArray) -> bool:
    size, difference = np.linalg.norm(one), np.linalg.norm(one - other)
    return bool(np.isfinite(size) and difference <= _MOST * size)


def _fading(
    spec: ModelSpec, absent: MaskArray, before: FlatArray, once: FlatArray, twice: FlatArray
) -> dict[str, float] | None:
    """None: statistics of absent neurons do something else than fade."""
    found = {}
    for tensor in spec.tensors:
        where = spec.slices[tensor.name]
        at = np.flatnonzero(absent[where]) + where.start
        if tensor.kind == "stat" and at.size:
            factor = round(float(np.median(once[at].astype(np.float64) / before[at])), 6)
            faded = before[at] * factor, before[at] * factor**2
            if not (_alike(faded[0], once[at]) and _alike(faded[1], twice[at])):
                return None
            found[tensor.name] = factor
    return found


def _made_up_weights(spec: ModelSpec) -> FlatArray:
    """Of usual sizes, none of them 0; variances positive."""
    draw, weights = Key.of("smaller network").generator(), np.zeros(spec.size, np.float32)
    for tensor, view in spec.views(weights):
        inputs = math.prod(tensor.shape[1:]) if tensor.kind == "weight" else 1
        drawn = draw.standard_normal(tensor.shape)
        view[...] = drawn / math.sqrt(inputs) if tensor.kind == "weight" else 0.5 + np.abs(drawn)
    return weights


def _made_up_samples(backend: Backend) -> tuple[InputArray, LabelArray]:
    spec, draw = backend.spec, Key.of("smaller network", "samples").generator()
    shape = (_SAMPLES, *spec.input_shape)
    x: InputArray = draw.standard_normal(shape).astype(np.float32)
    if backend.vocabulary is not None:
        x = draw.integers(0, backend.vocabulary, shape)
    target = backend.task.target_shape(spec.num_classes, spec.input_shape)
    if target == ():
        return x, draw.integers(0, spec.num_classes, _SAMPLES)
    return x, draw.integers(0, 2, (_SAMPLES, *target)).astype(np.float32)


@dataclass(frozen=True)
class Part:
    """A device's sub-model as a network by itself.

    Attributes:
        network: which computes it.
        positions: where its entries stand in the whole vector, shape (network.backend.spec.size,).
        whole: the model.
    """

    network: Smaller
    positions: NDArray[np.intp]
    whole: ModelSpec

    def taken(self, vector: FlatArray) -> FlatArray:
        """What it has of a whole vector."""
        return vector[self.positions]

    def plan(self, plan: FitPlan) -> FitPlan:
        """The same plan for the network."""
        assert plan.trainable is not None, "or it would not be a part"
        trainable, pull = plan.trainable[self.positions], plan.pull
        spec = self.network.backend.spec
        if pull is not None:
            mask = None if pull.mask is None else pull.mask[self.positions]
            pull = Pull(self.taken(pull.target), pull.strength, mask)
        whole = bool(trainable[: spec.num_parameters].all())
        return replace(plan, trainable=None if whole else trainable, pull=pull, neurons=None)

    def states(self, states: KeptStates | None) -> KeptStates | None:
        """Of the optimiser, as the network's."""
        return None if states is None else _StatesOfPart(states, self)

    def put_back(self, fit: Fit, weights: FlatArray) -> Fit:
        """What masked training from `weights` would have made."""
        after = weights.copy()
        for name, factor in self.network.fading.items():
            after[self.whole.slices[name]] *= np.float32(factor**fit.num_steps)
        after[self.positions] = fit.weights
        return replace(fit, weights=after)


def part_of(backend: Backend, weights: FlatArray, plan: FitPlan) -> Part | None:
    """The network that trains the same as this plan; None: that has to be masked."""
    if plan.neurons is None or plan.trainable is None or plan.loss_term or plan.keep_last_gradient:
        return None
    spec, size = backend.spec, backend.spec.num_parameters
    active = plan.neurons.by_group(spec)
    network = backend.smaller(tuple(int(np.count_nonzero(group)) for group in active))
    if network is None:
        return None
    wanted = network.backend.spec.groups
    present = [_padded(group, count) for group, count in zip(active, wanted, strict=True)]
    positions = neuron_positions(spec, present)
    outside = np.ones(spec.size, bool)
    outside[positions] = False
    if weights[:size][outside[:size]].any() or plan.trainable[outside].any():
        return None
    return Part(network, positions, spec)


def _padded(active: MaskArray, count: int) -> MaskArray:
    """With the first absent neurons, so that there are `count`; their weights are 0 and do not train."""
    padded = active.copy()
    padded[np.flatnonzero(~active)[: count - np.count_nonzero(active)]] = True
    return padded


class _StatesOfPart(KeptStates):
    """What an optimiser keeps of the whole model's parameters, as that of a part."""

    def __init__(self, whole: KeptStates, part: Part) -> None:
        super().__init__(())
        self._whole, self._size = whole, part.whole.num_parameters
        self._positions = part.positions[: part.network.backend.spec.num_parameters]
        self._started = OptimiserState(())

    def next(self) -> OptimiserState:
        """To begin the next local training with."""
        self._started = self._whole.next()
        return OptimiserState(tuple(vector[self._positions] for vector in self._started.vectors))

    def put(self, state: OptimiserState) -> None:
        """What that local training ended with; the rest stays."""
        vectors = []
        for number, new in enumerate(state.vectors):
            started = self._started.vectors
            whole = started[number].copy() if started else np.zeros(self._size, np.float32)
            whole[self._positions] = new
            vectors.append(whole)
        self._whole.put(OptimiserState(tuple(vectors)))
