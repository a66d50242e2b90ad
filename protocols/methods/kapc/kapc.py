"""KAPC and BLS (Zhi et al., IEEE TMC 2024): each layer coached by a mix of the others'.

Round: from the latest layers it knows of the participants, the coordinator takes a step on the relationship
cube R and sends each participant i its own target s_i^l = sum_j r_ij^l w_j^l; the device trains from its own
w_i on f_i + lambda * ||w - s_i||^2 and sends its layers back. Layers are those with weights (convolutional
and linear modules with their bias); norm layers are neither related, pulled nor sent. BLS leaves out layers
in both directions (`KAPCwithBLS`). The cube's steps stand in `relationship_cube.py`, BLS's in `bls.py`,
the coordinator's state in `state.py`.

Who is absent: R is sliced to a round's participants, stepped and normalised among them (centre 1/|C|), and
written back; targets mix participants only. A device's layers stay as last heard, however long ago; one
never heard from stands at the initial weights, which all devices start from. A late joiner gets 1/N of
every row of R, the others keep their proportions; its own rows start uniform. An update overwrites the
sender's own latest layers and nothing else; entries of norm layers in it have no effect.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.methods.kapc import bls, relationship_cube
from fleetune.protocols.methods.kapc.bls import Visit
from fleetune.protocols.methods.kapc.state import ServerState
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.skeletons.averaging import Task
from fleetune.protocols.skeletons.choice import Budget, Choice, Cost, DeviceReport
from fleetune.protocols.skeletons.method import DeviceId, Method, Round, lazily
from fleetune.protocols.skeletons.targets import Update
from fleetune.protocols.skeletons.trainer import FitPlan, Pull, Trainer
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Layers


@dataclass(frozen=True)
class ClientState:
    """The device's own model, shape (spec.size,), and what BLS keeps of its last visit (None: none yet)."""

    weights: FlatArray
    visit: Visit | None = None


@dataclass(frozen=True)
class KAPC(Method[ServerState, ClientState, Task, Update]):
    """Settings.

    Attributes:
        coaching: lambda, strength of the pull towards the target.
        equal_sharing: beta, strength with which R is held near equal shares. The paper: 0.005 * lambda for
            very uneven classes (alpha 0.1), 0.5 * lambda for less uneven ones (alpha 0.3).
        relation_rate: eta, learning rate of R.
        relation_steps: E_r, gradient steps on R a round.
        safe_step: keep each of them within the inverse of its curvature; for many steps, which else may run
            away. A row that did becomes uniform.
        rows: how a row of R becomes shares again: clipped at 0 and divided by its sum, or projected.
    """

    spec: ModelSpec
    coaching: Annotated[float, Meta(ge=0)] = 1.0
    equal_sharing: Annotated[float, Meta(ge=0)] = 0.005
    relation_rate: Annotated[float, Meta(ge=0)] = 0.01
    relation_steps: Annotated[int, Meta(ge=0, le=1000)] = 1
    safe_step: bool = False
    rows: Literal["clip", "simplex"] = "clip"

    state_type, device_state_type = ServerState, ClientState
    task_type, update_type = Task, Update

    @cached_property
    def layers(self) -> dict[str, slice]:
        """The L layers that are related and sent, in module order, and where they stand."""
        norm = {tensor.layer for tensor in self.spec.tensors if tensor.kind == "norm"}
        return {name: where for name, where in self.spec.layers.items() if name not in norm}

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState.of(weights, len(self.layers))

    def admit(self, state: ServerState, report: DeviceReport) -> ServerState:
        return state if report.device in state.devices else state.knowing([report.device])

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights)

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        state = state.knowing(round_.participants).related_to_all()
        places = state.places(round_.participants)
        copies = state.copies(round_.participants, self.layers.values())
        shares = self._step(relationship_cube.slice_participants(state.cube, places), copies)

        def task(device: DeviceId) -> Task:
            place = round_.participants.index(device)
            target = relationship_cube.server_model(shares[place], copies)
            sent = self._sent(shares[place], place, state.uploaded.get(device))
            values = np.concatenate([np.empty(0), *(target[layer] for layer in sent)])
            return Task(Patch(self._named(sent), values.astype(np.float32)))

        written = relationship_cube.write_back(state.cube, places, shares)
        return replace(state, cube=written), lazily(round_.participants, task)

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        """Algorithm 2: from the device's own weights; a layer that did not come pulls towards these, too."""
        target = task.patch.apply(state.weights, self.spec)
        pull = Pull(target, self.coaching, Layers(tuple(self.layers)).mask(self.spec))
        weights = trainer.fit(state.weights, FitPlan(pull=pull), key).weights
        visit = self._select(state.visit, weights, target, trainer.num_classes_held)
        affordable = max(1, int(budget.ratio * len(self.layers) + 1e-9))
        count = len(self.layers) if visit is None else min(visit.uploaded, affordable)
        return ClientState(weights, visit), Update(Patch.of(weights, self._named(range(count)), self.spec))

    def aggregate(self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]]) -> ServerState:
        """Eq. (33): layers that did not come keep their latest value."""
        latest, uploaded = dict(state.latest), dict(state.uploaded)
        for device, update in updates:
            latest[device] = update.patch.apply(latest.get(device, state.initial), self.spec)
            uploaded[device] = self._prefix(update.patch)
        return replace(state, latest=latest, uploaded=uploaded)

    def shared_model(self, state: ServerState) -> FlatArray:
        """The plain mean of the devices heard from, for whoever comes without a model of their own."""
        shared = state.initial.copy()
        if state.latest:
            equal = np.full((len(self.layers), len(state.latest)), 1 / len(state.latest))
            copies = state.copies(sorted(state.latest), self.layers.values())
            mean = relationship_cube.server_model(equal, copies)
            for where, layer in zip(self.layers.values(), mean, strict=True):
                shared[where] = layer
        return shared

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """All layers both ways; the device holds its target beside its model."""
        return [self._choice(len(self.layers))]

    def _step(self, shares: relationship_cube.Cube, copies: list[list[FlatArray]]) -> relationship_cube.Cube:
        """`relation_steps` gradient steps on the participants' cube, then shares again (eq. 12 and 32)."""
        grams = [relationship_cube.gram(layer) for layer in copies]
        step = partial(
            relationship_cube.descend,
            grams=grams,
            coaching=self.coaching,
            equal_sharing=self.equal_sharing,
            rate=self.relation_rate,
            safe=self.safe_step,
        )
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(self.relation_steps):
                shares = step(shares)
        ran_away = ~np.isfinite(shares.sum(axis=-1, keepdims=True))
        shares = np.where(ran_away, 1 / len(shares), shares)
        return (relationship_cube.normalise if self.rows == "clip" else relationship_cube.project_simplex)(
            shares
        )

    def _sent(self, rows: NDArray[np.float64], place: int, uploaded: int | None) -> Sequence[int]:
        """The layers to send down."""
        return range(len(self.layers))

    def _prefix(self, patch: Patch) -> int:
        """How many layers, from the first, are in a patch."""
        held = patch.selection.mask(self.spec)
        missing = (i for i, where in enumerate(self.layers.values()) if not held[where].all())
        return next(missing, len(self.layers))

    def _select(
        self, last: Visit | None, weights: FlatArray, target: FlatArray, num_classes: int
    ) -> Visit | None:
        """How many layers to send up, and what to remember for the next time; None: all, nothing."""
        return None

    def _named(self, layers: Iterable[int]) -> Layers:
        names = tuple(self.layers)
        return Layers(tuple(names[layer] for layer in layers))

    def _choice(self, uploaded: int) -> Choice:
        sizes = [where.stop - where.start for where in self.layers.values()]
        down, up = estimate_bytes(sum(sizes)), estimate_bytes(sum(sizes[:uploaded]))
        cost = Cost(bytes_down=down, bytes_up=up, memory_bytes=4 * self.spec.size)
        return Choice(uploaded / len(sizes), cost)


@dataclass(frozen=True)
class KAPCwithBLS(KAPC):
    """KAPC that sends only the layers worth sending. Settings beyond KAPC's:

    Attributes:
        self_threshold: mu. A layer is not sent down when the device's share in its own target is above it.
        search: for Omega, the number of layers that go up: `largest`, the largest that satisfies
            inequality (29); or `literal`, as Algorithm 4 is printed.
        targets: which layers get a target: those that the device sent up at its last visit (eq. 20; at the
            first visit all), or `all` (Algorithm 5 as printed): the mix then holds layers that hardly
            anybody ever sent, and pulls them back to the initial weights (measured in docs/decisions.md).

    A device's budget may send up fewer layers than Omega, at least one: Fleetune's extension. The ratio
    of a choice is the share of layers, not of bytes.
    """

    self_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.7
    search: bls.Search = "largest"
    targets: Literal["uploaded", "all"] = "uploaded"

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """The first layers up, any number of them; down, at most all."""
        return [self._choice(count) for count in range(1, len(self.layers) + 1)]

    def _sent(self, rows: NDArray[np.float64], place: int, uploaded: int | None) -> Sequence[int]:
        dropped = bls.self_taught(rows, place, self.self_threshold)
        reach = len(self.layers) if uploaded is None or self.targets == "all" else uploaded
        return [layer for layer in range(reach) if layer not in dropped]

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
        """Of each layer's weight as a matrix: rows (outputs), columns (inputs, all taps of a kernel)."""
        first = {tensor.layer: tensor.shape or (1,) for tensor in reversed(self.spec.tensors)}
        return [(first[name][0], math.prod(first[name][1:])) for name in self.layers]
