"""After PerFedMask (Setayesh, Li, Wong; ICLR 2023): FedBABU where each device trains the layers it can
afford.

One round:

1. The coordinator chooses each device's layers (its mask) before training, for all devices together.
2. A device takes over the body, trains its layers under a head that never changes, and sends them back. The
    rest of the body is frozen.
3. The coordinator averages each entry over the devices that sent it, weighted by their training samples.

A device of capability c_n, the ratio that it reported, trains at most the share c_n of the body's parameters.
The masks M in {0, 1} should make this sum small:

    sum_n [ P * max_l K_nl - sum_l K_nl * P_l + c_n * P - sum_l M_nl * P_l ],  K_nl = M_nl / sum_n' M_n'l.

P_l are a layer's parameters and P the body's. K_nl, a device's share in a layer, is one over the number of
its trainers. The sum is small if K is even over all layers of the body, untrained ones included, and if the
capability is used. So devices that can afford few layers train the same ones, and in a body of few layers
other layers may stay untrained. The paper derives the first terms from a bias that arbitrary masks leave in
the solution.

We had the paper's abstract and its authors' code (github.com/MehdiSet/PerFedMask); the sum is the code's.
Differences:

- The code starts from the best of 1000 random fillings, relaxes M, takes up to 100 convex steps with a
  commercial solver and rounds at 0.5. `choose` starts from the best of 100 and then searches masks of 0 and 1
  directly. In at least 19 of 20 small cases it finds the minimum.
- The code knows all devices from the start. Here devices that are new, or have a new ratio, are fitted to the
  masks of the others. A device that can afford no layer trains the smallest.
- The personal model is the shared one, fine-tuned as a whole by its device. The code fine-tunes for 5 epochs
  after the last round. Here each round does so, without influence on the shared model.
- The combinations with HeteroFL and Split-Mix are missing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.method.averaging import Update, covered_average
from fleetune.protocols.method.choice import RATIOS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Method, Round, lazily
from fleetune.protocols.method.staleness import blend_with
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.compute_cost import compute_cost
from fleetune.protocols.model.spec import FlatArray, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Layers, norm_layers, split_at_head

STARTS = 100  # random fillings from which the best is chosen
SWEEPS = 10  # largest number of passes over the devices; two to five were enough for 100 devices

Sizes = NDArray[np.int64]  # P_l, shape (layers,)


@dataclass(frozen=True)
class ServerState:
    """The model, shape (spec.size,), each device's c_n, and its mask M_n, shape (layers,), once chosen."""

    weights: FlatArray
    ratios: dict[DeviceId, float]
    masks: dict[DeviceId, MaskArray]


@dataclass(frozen=True)
class ClientState:
    """The fine-tuned model, shape (spec.size,), and the head with which all devices started."""

    weights: FlatArray
    initial_head: Patch


@dataclass(frozen=True)
class Task:
    """The body, and the layers of it to train."""

    patch: Patch
    trained: Layers


def unevenness(options: MaskArray, others: MaskArray, sizes: Sizes) -> NDArray[np.float64]:
    """Return the sum above, without its constant sum_n c_n * P, for each mask that one device could have.

    Args:
        options: possible masks of the device, shape (options, layers).
        others: masks of the other devices, shape (devices, layers).
        sizes: P_l, parameters of each layer.

    Returns:
        The sum for each option, shape (options,); lower is better.
    """
    without = others.sum(axis=0)
    trainers = without + options
    own = 1 / np.where(options, trainers, np.inf).min(axis=1)
    fewest = np.where(others, without, np.inf).min(axis=1, keepdims=True)
    # an option adds one trainer to each of its layers; so the fewest trainers rise by one only if the option
    # has all layers with the fewest
    rarest = (others & (without == fewest)).astype(np.float32)
    fewest = fewest + (rarest @ (~options.T).astype(np.float32) == 0)
    total = sizes.sum() * (own + (1 / fewest).sum(axis=0)) - (trainers > 0) @ sizes - trainers @ sizes
    return np.asarray(total, np.float64)


def fill(order: NDArray[np.intp], budget: float, sizes: Sizes) -> MaskArray:
    """Take layers in this order if they still fit into the budget; True for each taken layer, shape
    (layers,).
    """
    mask = np.zeros(sizes.size, dtype=bool)
    for layer in order:
        mask[layer] = mask @ sizes + sizes[layer] <= budget
    return mask


def improve(masks: MaskArray, budgets: Mapping[int, float], sizes: Sizes) -> MaskArray:
    """Improve masks, shape (devices, layers), until no device in `budgets` (by row) gains by another mask.

    In turn, each device takes the best affordable mask that differs from its own in one or two layers.
    """
    masks, single = masks.copy(), np.eye(sizes.size, dtype=bool)
    pairs = [single[one] | single[other] for one in range(sizes.size) for other in range(one + 1)]
    changes = np.array([np.zeros_like(single[0]), *pairs])
    for _ in range(SWEEPS):
        before = masks.copy()
        for row, budget in budgets.items():
            options = masks[row] ^ changes
            options = options[(options @ sizes <= budget) & options.any(axis=1)]
            found = unevenness(options, np.delete(masks, row, axis=0), sizes)
            # ties go to the first mask, which is the device's own
            masks[row] = options[np.argmax(found <= found.min() + 1e-6)]
        if np.array_equal(masks, before):
            break
    return masks


def choose(
    known: Mapping[DeviceId, MaskArray], ratios: Mapping[DeviceId, float], sizes: Sizes, key: Key
) -> dict[DeviceId, MaskArray]:
    """Return the `known` masks, and improved random masks for the other devices in `ratios`."""
    new = [device for device in sorted(ratios) if device not in known]
    if not new:
        return dict(known)
    limits = {device: max(ratios[device] * sizes.sum() + 1e-6, sizes.min()) for device in new}

    def filling(start: int) -> MaskArray:
        orders = {device: key.child(start, device).permutation(sizes.size) for device in new}
        filled = [fill(orders[device], limits[device], sizes) for device in new]
        return np.array([*known.values(), *filled])

    masks = min(map(filling, range(STARTS)), key=lambda m: unevenness(m[:1], m[1:], sizes)[0])
    masks = improve(masks, dict(enumerate(limits.values(), len(known))), sizes)
    return dict(zip([*known, *new], masks, strict=True))


@dataclass(frozen=True)
class PerFedMask(Method[ServerState, ClientState, Task, Update]):
    """The method PerFedMask, with its settings.

    Attributes:
        head_layers: number of last layers that form the head; the paper uses one.
        fine_tuning_epochs: number of epochs of fine-tuning the personal model.
    """

    leak: ClassVar[str | None] = None

    diagnostics: ClassVar[tuple[Diagnostic, ...]] = (
        Diagnostic(
            "trainers",
            "devices that train a layer",
            "M: the share of the devices whose mask has the layer; a layer at 0 stays as it was drawn.",
            "share",
            of="round",
            by="layers",
        ),
    )

    spec: ModelSpec
    head_layers: Annotated[int, Meta(ge=1)] = 1
    fine_tuning_epochs: Annotated[int, Meta(ge=1, le=1000)] = 5

    state_type, device_state_type = ServerState, ClientState
    task_type, update_type = Task, Update
    semi_asynchronous: ClassVar[bool] = True
    starts_from_task: ClassVar[bool] = True

    def __post_init__(self) -> None:
        split_at_head(self.spec, self.head_layers)

    @cached_property
    def body(self) -> Layers:
        return split_at_head(self.spec, self.head_layers)[0]

    @cached_property
    def head(self) -> Layers:
        return split_at_head(self.spec, self.head_layers)[1]

    @cached_property
    def maskable(self) -> tuple[Layers, ...]:
        """Layers of the body, each with the normalisation layers after it."""
        found: list[tuple[str, ...]] = []
        for name in self.body.names:
            joins = found and name in norm_layers(self.spec)
            found.append((*found.pop(), name) if joins else (name,))
        return tuple(map(Layers, found))

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights, {}, {})

    def admit(self, state: ServerState, report: DeviceReport) -> ServerState:
        """Return the state with the device admitted.

        Its mask is chosen at the next plan, which chooses for all initial devices together.
        """
        if state.ratios.get(report.device) == report.ratio:
            return state
        masks = {device: mask for device, mask in state.masks.items() if device != report.device}
        return replace(state, ratios={**state.ratios, report.device: report.ratio}, masks=masks)

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights, Patch.of(weights, self.head, self.spec))

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        masks = choose(state.masks, state.ratios, self._sizes, key.child("masks"))
        body = Patch.of(state.weights, self.body, self.spec)
        all_layers = np.ones(len(self.maskable), dtype=bool)

        def task(device: DeviceId) -> Task:
            return Task(body, self._layers(masks.get(device, all_layers)))

        return replace(state, masks=masks), lazily(round_.participants, task)

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        start = state.initial_head.apply(task.patch.apply(state.weights, self.spec), self.spec)
        trainable = task.trained.mask(self.spec)
        trained = trainer.fit(start, FitPlan(trainable=trainable), key.child("body"))
        tuning = FitPlan(epochs=self.fine_tuning_epochs)
        personal = trainer.fit(start, tuning, key.child("fine-tuning"))
        sent = Patch.of(trained.weights, task.trained, self.spec)
        return ClientState(personal.weights, state.initial_head), Update(sent, trainer.num_samples)

    @property
    def combines(self) -> bool:
        return True

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        average = covered_average(state.weights, updates, self.spec, combine)
        return replace(state, weights=np.where(self.body.mask(self.spec), average, state.weights))

    def discount(self, state: ServerState, update: Update, factor: float) -> Update:
        return replace(update, patch=blend_with(update.patch, state.weights, factor, self.spec))

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        shares = np.mean(list(state.masks.values()), axis=0).tolist() if state.masks else []
        names = [layers.names[0] for layers in self.maskable]
        return {"trainers": dict(zip(names, shares, strict=True))} if shares else {}

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choices with the body sent down and at most the ratio's share sent up.

        The work is an upper bound: the most over all layers that the device could be given.
        """
        return [self._choice(ratio) for ratio in RATIOS]

    def _choice(self, ratio: float) -> Choice:
        body = int(self._sizes.sum())
        most = max(int(ratio * body + 1e-6), int(self._sizes.min()))
        cost = Cost(
            bytes_down=estimate_bytes(body),
            bytes_up=estimate_bytes(most),
            work=compute_cost(self.spec, self._layers(self._sizes <= most).mask(self.spec)),
            extra_epochs=float(self.fine_tuning_epochs),
        )
        return Choice(ratio, cost)

    @cached_property
    def _sizes(self) -> Sizes:
        return np.array([layers.count(self.spec) for layers in self.maskable])

    def _layers(self, mask: MaskArray) -> Layers:
        chosen = (layers.names for layers, taken in zip(self.maskable, mask, strict=True) if taken)
        return Layers(tuple(name for names in chosen for name in names))
