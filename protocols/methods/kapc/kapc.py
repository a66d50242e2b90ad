"""KAPC and BLS (Zhi et al., IEEE TMC 2024): each layer is coached by a mix of other devices' layers.

One round:

1. The coordinator takes a step on the relationship cube R, from the latest layers of the participants. It
    sends each participant i its own target s_i^l = sum_j r_ij^l w_j^l.
2. The device trains from its own w_i on f_i + lambda * ||w - s_i||^2 and sends its layers back.

Layers are convolutional and linear modules with their bias. Normalisation layers are neither related, pulled
nor sent. BLS leaves out layers in both directions (`KAPCwithBLS`). `relationship_cube.py` has the cube's
steps, and `bls.py` those of BLS.

Partial participation: R is restricted to a round's participants, stepped and normalised among them (centre
1/|C|), and written back. Targets mix participants only. The coordinator keeps the last layers of an absent
device; a device that has sent none has the initial weights, from which all devices start. A late joiner gets
1/N of every row of R, and its own rows start uniform. The others keep their proportions. An update overwrites
only the sender's latest layers; its entries of normalisation layers are ignored.

Small ratios (`downlink = "share"`, the default of new runs) are Fleetune's extension; in the paper, devices
exchange all layers. At the ratio k / L a device exchanges its first k layers both ways, from its first round
on. Each layer is related and mixed among the participants that exchange it. A device trains its later layers
without a pull.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.method.averaging import Task
from fleetune.protocols.method.choice import Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Method, Round, lazily
from fleetune.protocols.method.targets import Update
from fleetune.protocols.method.trainer import FitPlan, Pull, Trainer
from fleetune.protocols.method.utility import training_utility
from fleetune.protocols.methods.kapc import bls, relationship_cube
from fleetune.protocols.methods.kapc.bls import Visit
from fleetune.protocols.methods.kapc.diagnostics import (
    BLS_DIAGNOSTICS,
    DIAGNOSTICS,
    Coached,
    diagnose_round,
    diagnose_self_taught,
    diagnose_update,
)
from fleetune.protocols.methods.kapc.relationship_cube import Cube, Vector, grow, server_model
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Layers


@dataclass(frozen=True)
class ServerState:
    """The coordinator's state between rounds.

    Attributes:
        initial: initial weights of all devices, shape (spec.size,).
        devices: all admitted devices, ascending.
        related: devices that the cube covers, ascending; the other devices join it at the next plan.
        cube: R, float64, shape (len(related), layers, len(related)).
        latest: latest layers of each device that sent some, shape (spec.size,); `initial` elsewhere.
        uploaded: number of layers, from the first, in each device's last update.
        ratios: reported ratios; a missing device runs at 1.
        coached: record of the last planned round; None before the first.
    """

    initial: FlatArray
    devices: tuple[DeviceId, ...]
    related: tuple[DeviceId, ...]
    cube: NDArray[np.float64]
    latest: dict[DeviceId, FlatArray]
    uploaded: dict[DeviceId, int]
    ratios: dict[DeviceId, float] = field(default_factory=dict)
    coached: Coached | None = None

    @classmethod
    def of(cls, initial: FlatArray, num_layers: int) -> Self:
        """Return the state before any device is known."""
        return cls(initial, (), (), np.empty((0, num_layers, 0)), {}, {})

    def with_devices(self, newcomers: Iterable[DeviceId]) -> Self:
        """Return the state with these devices admitted.

        The cube grows only at the next plan, so that admitting a thousand devices does not copy it a thousand
        times.
        """
        return replace(self, devices=tuple(sorted({*self.devices, *newcomers})))

    def related_to_all(self) -> Self:
        """Return the state with a cube that covers every admitted device."""
        if self.related == self.devices:
            return self
        at = {device: place for place, device in enumerate(self.devices)}
        cube = grow(self.cube, [at[device] for device in self.related], len(self.devices))
        return replace(self, related=self.devices, cube=cube)

    def places(self, devices: Iterable[DeviceId]) -> list[int]:
        """Return the indices of these devices in the cube."""
        at = {device: place for place, device in enumerate(self.related)}
        return [at[device] for device in devices]

    def copies(self, devices: Iterable[DeviceId], layers: Iterable[slice]) -> list[list[FlatArray]]:
        """Return the latest received copy of each layer (outer) of each device (inner), as views."""
        weights = [self.latest.get(device, self.initial) for device in devices]
        return [[vector[where] for vector in weights] for where in layers]


@dataclass(frozen=True)
class Circle:
    """Consecutive layers that the same participants exchange.

    Attributes:
        layers: numbers of the layers, from 0.
        devices: participants, ascending.
        shares: part of the cube for these layers, shape (devices, layers, devices).
        copies: latest received copy of each layer (outer) of each device (inner).
    """

    layers: range
    devices: tuple[DeviceId, ...]
    shares: Cube
    copies: Sequence[Sequence[Vector]]

    def targets(self, device: DeviceId, layers: Sequence[int]) -> list[Vector]:
        """Return the device's float64 targets for the `layers` in this circle; empty if the device is not in
        it.
        """
        if device not in self.devices:
            return []
        chosen = [layer - self.layers.start for layer in layers if layer in self.layers]
        rows = self.shares[self.devices.index(device), chosen]
        return list(server_model(rows, [self.copies[layer] for layer in chosen]))


def circles(reach: Mapping[DeviceId, int]) -> Iterator[tuple[range, tuple[DeviceId, ...]]]:
    """Yield circles in the order of layers, if each participant exchanges its first `reach[device]` layers.

    Layers beyond the largest reach are in no circle.
    """
    for start, stop in pairwise([0, *sorted(set(reach.values()))]):
        yield range(start, stop), tuple(device for device, own in reach.items() if own >= stop)


PLAIN_RATE, THEOREM_RATE = 0.01, 1.0
_BEYOND = 0.4  # exponent of the utility of local training beyond the run's epochs


@dataclass(frozen=True)
class ClientState:
    """The device's own model, shape (spec.size,), and BLS's record of its last visit, if any."""

    weights: FlatArray
    visit: Visit | None = None


@dataclass(frozen=True)
class KAPC(Method[ServerState, ClientState, Task, Update]):
    """The method KAPC, with its settings.

    Attributes:
        coaching: lambda, strength of the pull towards the target.
        equal_sharing: beta, strength that holds R near equal shares. The paper has 0.005 * lambda for very
            uneven classes (alpha 0.1) and 0.5 * lambda for less uneven ones (alpha 0.3).
        step: length of a step on R. `per-layer` takes relation_rate / L_r for each layer, where L_r is the
            layer's own curvature as in Theorem 1. The step then depends only on how the devices' weights
            differ. `plain` takes relation_rate times the gradient, as in section 7.1. Its step depends on the
            size of layers and weights, and R hardly moved in our measurements. Runs that started before this
            setting existed continue with `plain`.
        relation_rate: eta, learning rate of R; 0 keeps equal shares. The default is 1 with per-layer steps
            (Theorem 1) and 0.01 with plain steps (the paper).
        relation_steps: E_r, number of gradient steps on R a round.
        safe_step: True limits each step to the inverse of its curvature, because many longer steps may
            diverge. A row that diverged becomes uniform.
        rows: how a row of R becomes shares again: clipped at 0 and divided by its sum, or projected to the
            nearest shares (`simplex`). The default is projection with per-layer steps, else clipping.
        downlink: what a device of ratio k / L is sent. `share` sends targets of the first k layers, and the
            device exchanges no others. `whole` sends targets of all layers; the ratio then limits only BLS's
            uploads.
    """

    leak: ClassVar[str | None] = (
        "devices' models are mixed by their similarity, so one step changes the mixture without a bound"
    )

    spec: ModelSpec
    coaching: Annotated[float, Meta(ge=0)] = 1.0
    equal_sharing: Annotated[float, Meta(ge=0)] = 0.005
    step: Literal["plain", "per-layer"] = "plain"
    relation_rate: Annotated[float, Meta(ge=0)] | None = None
    relation_steps: Annotated[int, Meta(ge=0, le=1000)] = 1
    safe_step: bool = False
    rows: Literal["clip", "simplex"] | None = None
    downlink: Literal["share", "whole"] = "whole"

    state_type, device_state_type = ServerState, ClientState
    not_combined: ClassVar[str] = "each device gets a mixture of its own"
    task_type, update_type = Task, Update
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = DIAGNOSTICS

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, Any]:  # noqa: ARG003 - of any length
        """Return settings of a new run that differ from the paper's."""
        return {"step": "per-layer", "downlink": "share"}

    @cached_property
    def layers(self) -> dict[str, slice]:
        """The L layers that are related and sent, in module order, with their range in the flat vector."""
        norm = {tensor.layer for tensor in self.spec.tensors if tensor.kind == "norm"}
        return {name: where for name, where in self.spec.layers.items() if name not in norm}

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState.of(weights, len(self.layers))

    def admit(self, state: ServerState, report: DeviceReport) -> ServerState:
        if report.device not in state.devices:
            state = state.with_devices([report.device])
        if state.ratios.get(report.device, 1.0) == report.ratio:
            return state
        return replace(state, ratios={**state.ratios, report.device: report.ratio})

    def forget(self, state: ServerState, device: DeviceId) -> ServerState:
        cube = state.cube
        if device in state.related:
            cube = relationship_cube.shrink(cube, state.related.index(device))
        return replace(super().forget(state, device), cube=cube, coached=None)

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights)

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        state = state.with_devices(round_.participants).related_to_all()
        reach = {device: self._reach(state.ratios.get(device, 1.0)) for device in round_.participants}
        exchanged = [self._circle(state, *circle) for circle in circles(reach)]
        own = self._own_shares(exchanged, round_.participants)
        sent = {
            device: self._sent(
                device,
                [circle for circle in exchanged if device in circle.devices],
                state.uploaded.get(device),
            )
            for device in round_.participants
        }

        def task(device: DeviceId) -> Task:
            layers = sent[device]
            target = [target for circle in exchanged for target in circle.targets(device, layers)]
            values = np.concatenate([np.empty(0), *target])
            return Task(Patch(self._named(layers), values.astype(np.float32)))

        cube = state.cube.copy()
        for circle in exchanged:
            span, places = slice(circle.layers.start, circle.layers.stop), state.places(circle.devices)
            cube[:, span] = relationship_cube.write_back(cube[:, span], places, circle.shares)
        is_sent = np.array(
            [[layer in layers for layer in range(len(self.layers))] for layers in sent.values()]
        )
        coached = Coached(own, np.array(list(reach.values()), dtype=np.int64), is_sent)
        return replace(state, cube=cube, coached=coached), lazily(round_.participants, task)

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        """Algorithm 2: train from the device's own weights, pulled towards the targets.

        A layer that was not sent is pulled towards the device's own weights. A layer that the device does not
        exchange is not pulled.
        """
        reach = self._reach(budget.ratio)
        target = task.patch.apply(state.weights, self.spec)
        pull = Pull(target, self.coaching, self._named(range(reach)).mask(self.spec))
        weights = trainer.fit(state.weights, FitPlan(pull=pull), key).weights
        visit = self._select(state.visit, weights, target, trainer.num_classes_held)
        count = reach if visit is None else min(visit.uploaded, self._affordable(budget.ratio))
        return ClientState(weights, visit), Update(Patch.of(weights, self._named(range(count)), self.spec))

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        """Store the received layers (eq. 33); layers that did not arrive keep their latest value."""
        latest, uploaded = dict(state.latest), dict(state.uploaded)
        for device, update in updates:
            latest[device] = update.patch.apply(latest.get(device, state.initial), self.spec)
            uploaded[device] = self._prefix(update.patch)
        return replace(state, latest=latest, uploaded=uploaded)

    def shared_model(self, state: ServerState) -> FlatArray:
        """Return the plain mean of the received layers, for devices without a model.

        Each layer's mean covers the devices that exchange it.
        """
        shared = state.initial.copy()
        reach = {device: self._reach(state.ratios.get(device, 1.0)) for device in sorted(state.latest)}
        places = list(self.layers.values())
        for layers, devices in circles(reach):
            span = places[layers.start : layers.stop]
            equal = np.full((len(span), len(devices)), 1 / len(devices))
            mean = relationship_cube.server_model(equal, state.copies(devices, span))
            for where, layer in zip(span, mean, strict=True):
                shared[where] = layer
        return shared

    def diagnose_update(self, update: Update) -> Mapping[str, Figure]:
        return diagnose_update(self._prefix(update.patch), self._sizes)

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        return {} if state.coached is None else diagnose_round(state.coached, list(self.layers), self._sizes)

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choices of the number of first layers sent both ways; with the `whole` downlink, all go
        down.

        Each choice also needs memory for one whole vector, because `Pull` takes the target as such.
        """
        fewest = len(self.layers) if self.downlink == "whole" else 1
        return [self._choice(count) for count in range(fewest, len(self.layers) + 1)]

    def _choice(self, count: int) -> Choice:
        ratio = count / len(self.layers)
        cost = Cost(
            bytes_down=estimate_bytes(sum(self._sizes[: self._reach(ratio)])),
            bytes_up=estimate_bytes(sum(self._sizes[:count])),
            memory_bytes=4 * self.spec.size,
        )
        return Choice(ratio, cost)

    def _reach(self, ratio: float) -> int:
        """Return how many layers, counted from the first, a device exchanges at most."""
        return len(self.layers) if self.downlink == "whole" else self._affordable(ratio)

    def _affordable(self, ratio: float) -> int:
        """Return how many layers, counted from the first, a ratio allows; at least one."""
        return max(1, int(ratio * len(self.layers) + 1e-9))

    @cached_property
    def _sizes(self) -> list[int]:
        """Number of entries of each layer."""
        return [where.stop - where.start for where in self.layers.values()]

    def _circle(self, state: ServerState, layers: range, devices: tuple[DeviceId, ...]) -> Circle:
        """Return a circle, with its part of the cube after the step from `state`."""
        places, span = state.places(devices), slice(layers.start, layers.stop)
        copies = state.copies(devices, list(self.layers.values())[span])
        before = relationship_cube.slice_participants(state.cube[:, span], places)
        return Circle(layers, devices, self._step(before, copies), copies)

    def _own_shares(
        self, exchanged: Sequence[Circle], participants: Sequence[DeviceId]
    ) -> NDArray[np.float64]:
        """Return each participant's share in its own target, shape (participants, L); 1 at layers without a
        target.
        """
        own = np.ones((len(participants), len(self.layers)))
        at = {device: place for place, device in enumerate(participants)}
        for circle in exchanged:
            for place, device in enumerate(circle.devices):
                own[at[device], circle.layers] = circle.shares[place, :, place]
        return own

    def _step(self, shares: relationship_cube.Cube, copies: list[list[FlatArray]]) -> relationship_cube.Cube:
        """Take `relation_steps` gradient steps on the cube, then make its rows shares (eq. 12 and 32)."""
        per_layer = self.step == "per-layer"
        default = THEOREM_RATE if per_layer else PLAIN_RATE
        step = partial(
            relationship_cube.descend,
            grams=[relationship_cube.gram(layer, centred=per_layer) for layer in copies],
            coaching=self.coaching,
            equal_sharing=self.equal_sharing,
            rate=default if self.relation_rate is None else self.relation_rate,
            per_layer=per_layer,
            safe=self.safe_step,
        )
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(self.relation_steps):
                shares = step(shares)
        ran_away = ~np.isfinite(shares.sum(axis=-1, keepdims=True))
        shares = np.where(ran_away, 1 / len(shares), shares)
        projected = self.rows == "simplex" or (self.rows is None and per_layer)
        return (relationship_cube.project_simplex if projected else relationship_cube.normalise)(shares)

    def _sent(self, device: DeviceId, exchanged: Sequence[Circle], uploaded: int | None) -> Sequence[int]:
        """Return the layers to send down to a device, from its circles."""
        return [layer for circle in exchanged for layer in circle.layers]

    def _prefix(self, patch: Patch) -> int:
        """Return how many layers, counted from the first, a patch holds."""
        held = patch.selection.mask(self.spec)
        missing = (i for i, where in enumerate(self.layers.values()) if not held[where].all())
        return next(missing, len(self.layers))

    def _select(
        self, last: Visit | None, weights: FlatArray, target: FlatArray, num_classes: int
    ) -> Visit | None:
        """Choose the number of layers to send up; return it in the record for the next visit. None sends all
        layers.
        """
        return None

    def _named(self, layers: Iterable[int]) -> Layers:
        names = tuple(self.layers)
        return Layers(tuple(names[layer] for layer in layers))


@dataclass(frozen=True)
class KAPCwithBLS(KAPC):
    """KAPC that sends only the layers worth sending. Settings in addition to KAPC's:

    Attributes:
        self_threshold: mu. A layer is not sent down if the device's share in its own target is above mu. At 1
            every layer is sent, which is BLS without its downlink part.
        search: how Omega, the number of uploaded layers, is found. `largest` takes the largest that satisfies
            inequality (29); `literal` follows Algorithm 4 as printed.
        targets: layers that get a target. `uploaded` takes those that the device sent at its last visit (eq.
            20; all at the first visit). `all` follows Algorithm 5 as printed. The mix then holds layers that
            hardly any device ever sent, and pulls them back to the initial weights (measured in
            docs/decisions.md).

    A device's ratio also limits Omega. It is a share of layers, not of bytes.
    """

    leak: ClassVar[str | None] = (
        "devices' models are mixed by their similarity, and layers are sent by how much they changed"
    )

    self_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.7
    search: bls.Search = "largest"
    targets: Literal["uploaded", "all"] = "uploaded"

    diagnostics = BLS_DIAGNOSTICS

    @classmethod
    def utility(cls, budget: Budget) -> float:
        """Measured utility: exchanging more layers does not speed up learning, and more local training adds
        little.

        Rounds to an accuracy with one, two and all four layers: 12, 18 and more than 24. With 2 and 4 times
        the local training: 20 and 11 rounds instead of 28. To a higher accuracy: 23 and 21 instead of 30.
        Measured with har-cnn on UCI HAR, one seed.
        """
        return (1 - budget.ratio / 2) * training_utility(budget.local_work, _BEYOND)

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choices of the number of first layers sent up; at most as many are sent down.

        With the `whole` downlink, all layers are sent down.
        """
        return [self._choice(count) for count in range(1, len(self.layers) + 1)]

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        if state.coached is None:
            return {}
        return {**super().diagnose_round(state), **diagnose_self_taught(state.coached, self.self_threshold)}

    def _sent(self, device: DeviceId, exchanged: Sequence[Circle], uploaded: int | None) -> Sequence[int]:
        bound = len(self.layers) if uploaded is None or self.targets == "all" else uploaded
        sent = []
        for circle in exchanged:
            place = circle.devices.index(device)
            dropped = bls.self_taught(circle.shares[place], place, self.self_threshold)
            sent += [layer for at, layer in enumerate(circle.layers) if at not in dropped and layer < bound]
        return sent

    def _select(
        self, last: Visit | None, weights: FlatArray, target: FlatArray, num_classes: int
    ) -> Visit | None:
        return bls.select(
            last,
            [weights[where] for where in self.layers.values()],
            [target[where] for where in self.layers.values()],
            self._shapes,
            num_classes,
            self.search,
        )

    @cached_property
    def _shapes(self) -> list[tuple[int, int]]:
        """Return each layer's weight as a matrix shape: rows (outputs) and columns (inputs, all taps of a
        kernel).
        """
        first = {tensor.layer: tensor.shape or (1,) for tensor in reversed(self.spec.tensors)}
        return [(first[name][0], math.prod(first[name][1:])) for name in self.layers]
