"""After pFedLA (Ma, Zhang, Guo, Xu; CVPR 2022): each layer is mixed by weights that networks learn.

For each device i the coordinator has a hypernetwork: an embedding v_i and a small network psi_i. Their output
is a weight alpha_i^lj for each layer l and device j. One round:

1. Device i gets w_i^l = sum_j alpha_i^lj * theta_j^l.
2. It trains this model and sends the result theta_i back.
3. The update d_i = theta_i - w_i stands for the negative gradient of the device's loss. The coordinator moves
    v_i and psi_i a step along (dw_i / d(v_i, psi_i))^T d_i.

`local_layers` is the paper's HeurpFedLA: the k layers with the largest own weight alpha_i^li stay on the
device and are not sent down. Ties go to the later layers.

The authors published no code, and we do not know the sizes and initial values of the paper's fully connected
layers. An unofficial reproduction (github.com/KarhouTam/pFedLA) has 3 hidden layers of 100 with ReLU and an
embedding of 100; these are our defaults. It passes scores through ReLU and divides them by their sum, draws
the last layers within 0 and 1, and takes steps of 0.005 in the opposite direction. Ours has a softmax over
the devices, last layers that start at 0 (equal weights), and plain gradient steps. A step that would overflow
is skipped.

Partial participation: the paper has all devices from the start. Here j runs over the devices that have sent
an update, with their latest models. A new device gets a mix of these and enters with score 0. Running
statistics, and entries that the coordinator never received, stay the device's.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.method.averaging import PersonalDevice, PersonalModel, Task
from fleetune.protocols.method.choice import Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Round, lazily
from fleetune.protocols.method.targets import Update
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine, CoveredMean
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything, Layers

HIDDEN_LAYERS = 3

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Hypernetwork:
    """A device's hypernetwork. In each matrix the last column belongs to a constant input of 1.

    Attributes:
        embedding: v_i, shape (embedding,).
        hidden: shapes (hidden, embedding + 1) and (hidden, hidden + 1).
        heads: from the last hidden layer to the scores, shape (layers, devices, hidden + 1).
    """

    embedding: Floats
    hidden: tuple[Floats, ...]
    heads: Floats

    @classmethod
    def drawn(cls, embedding: int, hidden: int, layers: int, key: Key) -> "Hypernetwork":
        """Return a new network without devices: embedding of variance 1, hidden layers within 1 /
        sqrt(inputs).
        """

        def uniform(name: str | int, *shape: int) -> Floats:
            return (2 * key.child(name).uniform(int(np.prod(shape))) - 1).reshape(shape)

        inputs = [embedding, *[hidden] * (HIDDEN_LAYERS - 1)]
        matrices = (uniform(at, hidden, size + 1) / np.sqrt(size) for at, size in enumerate(inputs))
        heads = np.zeros((layers, 0, hidden + 1))
        return cls(np.sqrt(3) * uniform("embedding", embedding), tuple(matrices), heads)

    def with_devices(self, devices: int) -> "Hypernetwork":
        """Return the network extended to `devices` devices; new devices have score 0."""
        layers, known, inputs = self.heads.shape
        new = np.zeros((layers, devices - known, inputs))
        return replace(self, heads=np.concatenate([self.heads, new], axis=1))

    def shares(self) -> Floats:
        """Return the shares alpha_i, shape (layers, devices)."""
        return _softmax(self.heads @ _with_one(self._activations()[-1]))

    def without_device(self, column: int) -> "Hypernetwork":
        """Return the network without the device of this column; one that it lacks has score 0."""
        known = self.heads.shape[1]
        return replace(self, heads=np.delete(self.heads, column, axis=1)) if column < known else self

    def stepped(self, gradient: Floats, rate: float) -> "Hypernetwork":
        """Return the network after one gradient step; `gradient` is the loss's gradient by alpha_i, same
        shape.
        """
        *inputs, last = self._activations()
        shares = _softmax(self.heads @ _with_one(last))
        scores = shares * (gradient - (shares * gradient).sum(axis=1, keepdims=True))
        heads = self.heads - rate * scores[:, :, None] * _with_one(last)
        back, hidden = np.tensordot(scores, self.heads[:, :, :-1], axes=2), list(self.hidden)
        for at, outputs in reversed(list(enumerate([*inputs[1:], last]))):
            back = back * (outputs > 0)
            hidden[at] = self.hidden[at] - rate * np.outer(back, _with_one(inputs[at]))
            back = back @ self.hidden[at][:, :-1]
        return Hypernetwork(self.embedding - rate * back, tuple(hidden), heads)

    @property
    def is_finite(self) -> bool:
        """True if all numbers in the network and the resulting weights are finite."""
        held = [*self.hidden, self.heads, self.embedding]
        return all(np.isfinite(one).all() for one in held) and bool(np.isfinite(self.shares()).all())

    def _activations(self) -> list[Floats]:
        """Return the embedding, and the output of each hidden layer."""
        found = [self.embedding]
        for matrix in self.hidden:
            found.append(np.maximum(0, matrix @ _with_one(found[-1])))
        return found


def _with_one(values: Floats) -> Floats:
    return np.append(values, 1.0)


def _softmax(scores: Floats) -> Floats:
    """Return the softmax over the last axis, which may be empty."""
    powers = np.exp(scores - scores.max(axis=-1, initial=-np.inf, keepdims=True))
    softmax: Floats = powers / powers.sum(axis=-1, keepdims=True)
    return softmax


@dataclass(frozen=True)
class ServerState:
    """The coordinator's state between rounds.

    Attributes:
        initial: initial weights of all devices, shape (spec.size,).
        devices: devices that have sent an update, in the order of the hypernetworks' columns.
        latest: theta_j, last model of each of them, shape (spec.size,).
        networks: hypernetworks of the devices that had a task; one may lack columns for the last of
            `devices`.
    """

    initial: FlatArray
    devices: tuple[DeviceId, ...] = ()
    latest: dict[DeviceId, FlatArray] = field(default_factory=dict)
    networks: dict[DeviceId, Hypernetwork] = field(default_factory=dict)


@dataclass(frozen=True)
class PFedLA(PersonalDevice[ServerState, Task, Update]):
    """The method pFedLA, with its settings.

    Attributes:
        rate: learning rate of the hypernetworks. At the reproduction's 0.005, the weights stayed equal in 30
            rounds of 6 devices; at 0.5 they moved. 20 devices needed 5. With too high a rate, each device is
            left with one model, mostly its own.
        local_layers: k of HeurpFedLA, number of layers that stay on the device; 0 is pFedLA.
        embedding: size of v_i.
        hidden: number of neurons in each hidden layer of psi_i.
    """

    leak: ClassVar[str | None] = "the coordinator learns from each device's step how to mix the models"

    diagnostics: ClassVar[tuple[Diagnostic, ...]] = (
        Diagnostic(
            "own_share",
            "own share",
            "alpha_i^li, mean over devices: how much of a layer is the device's own; 1 / devices at first.",
            "share",
            of="round",
            by="layers",
        ),
    )

    spec: ModelSpec
    rate: Annotated[float, Meta(ge=0)] = 0.5
    local_layers: Annotated[int, Meta(ge=0)] = 0
    embedding: Annotated[int, Meta(ge=1, le=10_000)] = 100
    hidden: Annotated[int, Meta(ge=1, le=10_000)] = 100

    state_type, task_type, update_type = ServerState, Task, Update
    not_combined: ClassVar[str] = "each device gets a mixture of its own"

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights)

    def forget(self, state: ServerState, device: DeviceId) -> ServerState:
        rest = super().forget(state, device)
        if device not in state.devices:
            return rest
        column = state.devices.index(device)
        networks = {other: network.without_device(column) for other, network in rest.networks.items()}
        return replace(rest, networks=networks)

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        def drawn(device: DeviceId) -> Hypernetwork:
            layers, here = len(self.spec.layers), key.child("hypernetwork", device)
            return Hypernetwork.drawn(self.embedding, self.hidden, layers, here)

        new = {device: drawn(device) for device in round_.participants if device not in state.networks}
        planned = replace(state, networks={**state.networks, **new})

        def task(device: DeviceId) -> Task:
            shares = self._mixing_weights(planned, device)
            own_layers = self._layers_to_keep(planned, device, shares)
            sent = tuple(name for name, stays in zip(self.spec.layers, own_layers, strict=True) if not stays)
            return Task(Patch.of(self._mixture(planned, shares), Layers(sent), self.spec))

        return planned, lazily(round_.participants, task)

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        fit = trainer.fit(task.patch.apply(state.weights, self.spec), FitPlan(), key)
        return PersonalModel(fit.weights), Update(Patch.of(fit.weights, Everything(), self.spec))

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        latest, networks = dict(state.latest), dict(state.networks)
        for device, update in updates:
            latest[device] = update.patch.apply(state.initial, self.spec)
            networks[device] = self._updated_network(state, device, latest[device])
        new = (device for device in latest if device not in state.latest)
        return replace(state, devices=(*state.devices, *new), latest=latest, networks=networks)

    def shared_model(self, state: ServerState) -> FlatArray:
        """Return the plain mean of the received models; no device trains on it."""
        mean = CoveredMean(self.spec)
        for device in state.devices:
            mean.add(Patch.of(state.latest[device], Everything(), self.spec), 1)
        return mean.over(state.initial)

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        own = [
            self._mixing_weights(state, device)[:, at]
            for at, device in enumerate(state.devices)
            if device in state.networks
        ]
        means = np.mean(own, axis=0).tolist() if own else []
        return {"own_share": dict(zip(self.spec.layers, means, strict=True))} if own else {}

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choice of whole models, because the layers that stay local are known only later."""
        whole = estimate_bytes(self.spec.num_parameters)
        return [Choice(1.0, Cost(bytes_down=whole, bytes_up=whole))]

    def _mixing_weights(self, state: ServerState, device: DeviceId) -> Floats:
        """Return the mixing weights alpha_i over `state.devices`, shape (layers, devices)."""
        return state.networks[device].with_devices(len(state.devices)).shares()

    def _mixture(self, state: ServerState, shares: Floats) -> FlatArray:
        """Return the mixture w_i, shape (spec.size,); the initial weights before the first update."""
        if not state.devices:
            return state.initial
        mixed = np.zeros(self.spec.size)
        for device, column in zip(state.devices, shares.T, strict=True):
            for where, share in zip(self.spec.layers.values(), column, strict=True):
                mixed[where] += share * state.latest[device][where]
        return mixed.astype(state.initial.dtype)

    def _layers_to_keep(self, state: ServerState, device: DeviceId, shares: Floats) -> NDArray[np.bool_]:
        """Mark the layers that stay on the device, bool, shape (layers,)."""
        own_layers = np.zeros(len(shares), dtype=bool)
        if device in state.devices:
            order = np.argsort(shares[:, state.devices.index(device)], kind="stable")
            own_layers[order[max(0, order.size - self.local_layers) :]] = True
        return own_layers

    def _updated_network(self, state: ServerState, device: DeviceId, weights: FlatArray) -> Hypernetwork:
        """Return the device's hypernetwork after its step.

        `state` is the plan's state, and `weights` is the device's update.
        """
        shares = self._mixing_weights(state, device)
        with np.errstate(over="ignore", invalid="ignore"):
            gradient = self._gradient(state, shares, weights)
            gradient[self._layers_to_keep(state, device, shares)] = 0
            network = state.networks[device].with_devices(len(state.devices))
            stepped = network.stepped(gradient, self.rate)
            return stepped if stepped.is_finite else network

    def _gradient(self, state: ServerState, shares: Floats, weights: FlatArray) -> Floats:
        """Return the gradient of the loss by `shares`, same shape.

        The change by local training is used as the negative gradient by the mixture.
        """
        moved = (weights - self._mixture(state, shares)).astype(np.float64)
        products = [
            [state.latest[other][where] @ moved[where] for other in state.devices]
            for where in self.spec.layers.values()
        ]
        return -np.reshape(products, shares.shape)
