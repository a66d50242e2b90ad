"""ClusterFL (Ouyang et al., MobiSys 2021; TOSN 2022): devices' models learn from related ones, by ADMM.

Its objective has the models w_i, the matrix W with one row for each model, and the relations F, one row a
device:

    sum_i f_i(w_i) + shrink * tr(W W') - attract * tr(F' W W' F).

The alternating direction method (ADMM) gives every column j of F a copy O_j of F_j' W. A multiplier U_j and
the penalty rho hold the copy to its value. One round:

1. The coordinator sends each device one pull (`PullTask`): all terms below but f_i, from the latest models.
   The authors' code sends all of O and U to every device instead.
2. The device trains from its own model on its part of the augmented Lagrangian, and sends its model:

    f_i(w) + shrink ||w||^2 - sum_j F_ij <U_j, w> + rho / 2 sum_j ||O_j - sum_(k != i) F_kj w_k - F_ij w||^2.

3. The coordinator sets O_j = (rho F_j' W - U_j) / (rho - 2 attract) and adds rho (O_j - F_j' W) to U_j.

The relations F are computed after the first round, after the first update of a new device, and after every
`regroup_rounds` rounds. A new column starts with U = 0.

Differs from the authors' code (github.com/xmouyang/ClusterFL; shrink 0.001, attract 0.0005, rho 0.002, 20
epochs a round, new F every third round):

- The code computes F from KL divergences between the models' answers on the coordinator's samples. Our
  coordinator has no samples. It uses inner products of the models' changes since the initial weights,
  negative ones set to 0, and divides each column by its sum (`relations = "soft"`; a comment in the code does
  the same). F is divided by its largest singular value if that is above 1, so that a minimum exists.
- The code's devices add the linear term and omit F_kj w_k. Both follow the Lagrangian here.
- `relations = "k-means"` is DC-PFL's description of ClusterFL (section V-A). Each device in a group of n then
  has 1 / sqrt(n) in the group's column.

All devices start from the run's initial weights. The coordinator keeps the last model of an absent device. A
device that has sent no update yet is pulled towards the mean of all models.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.bounds import LARGEST_AMOUNT, Number, Positive
from fleetune.protocols.errors import SettingError
from fleetune.protocols.method.averaging import PersonalDevice, PersonalModel, Task
from fleetune.protocols.method.choice import Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Round, lazily
from fleetune.protocols.method.targets import Update
from fleetune.protocols.method.trainer import FitPlan, Pull, Trainer
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Everything

Labels = NDArray[np.int64]
Floats = NDArray[np.float64]
Columns = tuple[tuple[DeviceId, ...], ...]
_MOST_STEPS = 100  # bound on the steps of Lloyd's algorithm, which converges much earlier


@dataclass(frozen=True)
class Consensus:
    """The variables of ADMM: relations, copies and multipliers.

    Attributes:
        columns: the devices of each column of F: a group, or one device.
        relations: rows of F, each of shape (columns,).
        copies: O_j, shape (columns, parameters).
        multipliers: U_j, same shape.
    """

    columns: Columns
    relations: dict[DeviceId, Floats]
    copies: Floats
    multipliers: Floats


@dataclass(frozen=True)
class ServerState:
    """The coordinator's state between rounds.

    Attributes:
        initial: initial weights of all devices, shape (spec.size,).
        models: latest model of each device, same shape.
        groups: K-means group of each device; empty with soft relations.
        rounds: number of aggregated rounds.
        consensus: state of ADMM; None before the first update.
    """

    initial: FlatArray
    models: dict[DeviceId, FlatArray]
    groups: dict[DeviceId, int]
    rounds: Number = 0
    consensus: Consensus | None = None


@dataclass(frozen=True)
class PullTask(Task):
    """A task that pulls the device's model towards the patch's values, with the given strength."""

    strength: Positive


def farthest_points(products: NDArray[np.float64], count: int) -> list[int]:
    """Choose at most `count` different points that are far from each other.

    The first point is the farthest from all others.

    Args:
        products: inner products of the points, shape (N, N).
        count: largest number of points.
    """
    norms = np.diag(products)
    squared = norms[:, None] + norms - 2 * products
    chosen = [int(squared.sum(axis=1).argmax())]
    while len(chosen) < count:
        gaps = squared[:, chosen].min(axis=1)
        if gaps.max() <= 1e-12 * norms.max():
            break
        chosen.append(int(gaps.argmax()))
    return chosen


def k_means(products: NDArray[np.float64], count: int) -> Labels:
    """Group N points by Lloyd's K-means from their inner products alone.

    Deterministic; groups that lose all their points vanish.
    """
    # column k: each point's share in centre k
    centres = np.eye(len(products))[:, farthest_points(products, count)]
    labels: Labels = np.full(len(products), -1, dtype=np.int64)
    for _ in range(_MOST_STEPS):
        own = np.einsum("ik,ij,jk->k", centres, products, centres)
        nearest = np.argmin(own - 2 * products @ centres, axis=1)
        if np.array_equal(nearest, labels):
            break
        labels = np.unique(nearest, return_inverse=True)[1].astype(np.int64)
        member = np.eye(labels.max() + 1)[labels]
        centres = member / member.sum(axis=0)
    return labels


def _products(models: list[FlatArray], initial: FlatArray, spec: ModelSpec) -> NDArray[np.float64]:
    """Return inner products of the models' changes since `initial`, shape (N, N)."""
    with np.errstate(over="ignore", invalid="ignore"):
        moves = np.stack([(model - initial)[: spec.num_parameters] for model in models])
        products = (moves @ moves.T).astype(np.float64)
    if np.isfinite(products).all():
        return products
    return _products([model.astype(np.float64) for model in models], initial, spec)


def soft_relations(products: Floats) -> Floats:
    """Return F from inner products, both shape (N, N): columns sum to 1; one without a positive product is 0.

    F is divided by its largest singular value if that is above 1.
    """
    centred = products - products.mean(axis=0) - products.mean(axis=1, keepdims=True) + products.mean()
    positive = np.maximum(centred, 0)
    sums = positive.sum(axis=0)
    relations = np.divide(positive, sums, out=np.zeros_like(positive), where=sums > 0)
    return relations / max(1.0, float(np.linalg.norm(relations, 2)))  # type: ignore[no-any-return]


def group_relations(groups: Mapping[DeviceId, int]) -> tuple[Columns, Floats]:
    """Return the columns of F, and F with orthonormal columns, shape (devices ascending, columns)."""
    names = sorted(groups)
    columns = dict.fromkeys(tuple(d for d in names if groups[d] == groups[device]) for device in names)
    shares = [[(device in group) / np.sqrt(len(group)) for group in columns] for device in names]
    return tuple(columns), np.array(shares)


def stepped(sums: Floats, multipliers: Floats, attract: float, penalty: float) -> tuple[Floats, Floats]:
    """Return O and U after their step, from F' W (`sums`) and the previous U; all shapes (columns,
    parameters).
    """
    copies = (penalty * sums - multipliers) / (penalty - 2 * attract)
    return copies, multipliers + penalty * (copies - sums)


@dataclass(frozen=True)
class ClusterFL(PersonalDevice[ServerState, PullTask, Update]):
    """The method ClusterFL, with its settings.

    Attributes:
        num_groups: K, the largest number of groups. DC-PFL's paper does not give it.
        shrink: alpha, weight of the penalty on the models' size. The authors' code has 0.001, which has
            hardly any effect within tens of rounds.
        attract: beta, weight of the attraction between related models, at most alpha. The authors' code has
            alpha / 2. With more, the objective has no minimum. With beta = alpha, the penalty is alpha times
            the models' K-means distance.
        relations: how F is made: from K-means groups or `soft`.
        regroup_rounds: number of rounds between computations of the relations; the authors' code has 3. With
            0 they change only when a new device is heard from, as DC-PFL says.
        penalty: rho, ADMM's penalty, at least 4 * attract as in the authors' code. With less, the multipliers
            do not settle. The default is 8 * attract.
    """

    leak: ClassVar[str | None] = "devices are grouped by the similarity of their models"

    spec: ModelSpec
    num_groups: Annotated[int, Meta(ge=1)] = 3
    shrink: Annotated[float, Meta(gt=0)] = 0.1
    attract: Annotated[float, Meta(ge=0)] = 0.1
    relations: Literal["k-means", "soft"] = "k-means"
    regroup_rounds: Annotated[int, Meta(ge=0)] = 3
    penalty: Annotated[float, Meta(gt=0)] | None = None

    state_type, task_type, update_type = ServerState, PullTask, Update
    not_combined: ClassVar[str] = "each device gets a target of its own"
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = (
        Diagnostic(
            "group_devices",
            "devices in a group",
            "How many are in each group of K-means.",
            "count",
            of="round",
            by="groups",
        ),
        Diagnostic(
            "consensus_gap",
            "copies apart",
            "|O - F' W| / |F' W|: relative distance of ADMM's copies from their values; 0 after convergence.",
            "number",
            of="round",
        ),
    )

    def __post_init__(self) -> None:
        if self.attract > self.shrink:
            raise SettingError(
                f"method.attract: {self.attract:g} is above method.shrink ({self.shrink:g}); lower it"
            )
        if self._penalty < 4 * self.attract:
            raise SettingError(
                f"method.penalty: {self._penalty:g} is below 4 * method.attract ({4 * self.attract:g})"
            )
        if not self.shrink + self._penalty <= LARGEST_AMOUNT:
            raise SettingError(
                f"method.shrink: the sum with method.penalty is above {LARGEST_AMOUNT:g}; lower one"
            )

    @property
    def _penalty(self) -> float:
        return self.penalty or 8 * self.attract or self.shrink

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights, {}, {})

    def forget(self, state: ServerState, device: DeviceId) -> ServerState:
        """Return the state without the device, with new relations of the other devices."""
        if device not in state.models:
            return state
        rest = super().forget(state, device)
        if state.consensus is None or not rest.models:
            return replace(rest, consensus=None)
        return self._stepped(self._with_new_relations(rest))

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, PullTask]]:
        pulls = self.pulls(state)

        def task(device: DeviceId) -> PullTask:
            pull = pulls(device)
            return PullTask(Patch.of(pull.target, Everything(), self.spec), pull.strength)

        return state, lazily(round_.participants, task)

    def pulls(self, state: ServerState) -> Callable[[DeviceId], Pull]:
        """Return a function that gives a device's part of the augmented Lagrangian, as a pull."""
        mean = self._mean(state, state.models)
        held, newcomers = (
            state.consensus,
            Pull(mean * mean.dtype.type(self.attract / self.shrink), self.shrink),
        )
        if held is None:
            return lambda _: newcomers
        linear = held.multipliers + self._penalty * (held.copies - self._sums(state, held.relations))

        def pull(device: DeviceId) -> Pull:
            if device not in held.relations:
                return newcomers
            row = held.relations[device]
            own, size = state.models[device], self.spec.num_parameters
            strength = self.shrink + self._penalty / 2 * float(row @ row)
            target = own.copy()
            whole = row @ linear + self._penalty * float(row @ row) * own[:size].astype(np.float64)
            target[:size] = _as_float32(whole / (2 * strength))
            return Pull(target, strength)

        return pull

    def work(
        self, state: PersonalModel, task: PullTask, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        pull = Pull(task.patch.apply(state.weights, self.spec), task.strength)
        fit = trainer.fit(state.weights, FitPlan(pull=pull), key)
        return PersonalModel(fit.weights), Update(Patch.of(fit.weights, Everything(), self.spec))

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return one choice: whole models both ways. The device also holds its target in memory."""
        whole = estimate_bytes(self.spec.num_parameters)
        return [Choice(1.0, Cost(bytes_down=whole, bytes_up=whole, memory_bytes=4 * self.spec.size))]

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        models = dict(state.models)
        for device, update in updates:
            models[device] = update.patch.apply(models.get(device, state.initial), self.spec)
        now = replace(state, models=models, rounds=state.rounds + 1)
        due = bool(self.regroup_rounds) and now.rounds % self.regroup_rounds == 0
        known = {} if state.consensus is None else state.consensus.relations
        if models and (due or models.keys() != known.keys()):
            now = self._with_new_relations(now)
        return self._stepped(now)

    def shared_model(self, state: ServerState) -> FlatArray:
        """Return the plain mean of the received models, for new devices; no device trains on it."""
        return self._mean(state, state.models)

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        counts = Counter(state.groups.values())
        sizes = {f"group {label + 1}": float(counts[label]) for label in sorted(counts)}
        seen: dict[str, Figure] = {"group_devices": sizes} if sizes else {}
        if state.consensus is not None:
            sums = self._sums(state, state.consensus.relations)
            norm = float(np.linalg.norm(sums))
            if norm > 0:
                seen["consensus_gap"] = float(np.linalg.norm(state.consensus.copies - sums)) / norm
        return seen

    def _stepped(self, state: ServerState) -> ServerState:
        """Return `state` after the step of O and U."""
        if state.consensus is None:
            return state
        held, sums = state.consensus, self._sums(state, state.consensus.relations)
        copies, multipliers = stepped(sums, held.multipliers, self.attract, self._penalty)
        return replace(state, consensus=replace(held, copies=copies, multipliers=multipliers))

    def _with_new_relations(self, state: ServerState) -> ServerState:
        """Return `state` with newly computed relations; an unchanged column keeps its multiplier."""
        names = sorted(state.models)
        products = _products([state.models[name] for name in names], state.initial, self.spec)
        if self.relations == "soft":
            return self._with_relations(state, tuple((name,) for name in names), soft_relations(products))
        groups = dict(zip(names, k_means(products, self.num_groups).tolist(), strict=True))
        return self._with_relations(replace(state, groups=groups), *group_relations(groups))

    def _with_relations(self, state: ServerState, columns: Columns, relations: Floats) -> ServerState:
        """Return `state` with these relations, before the step of O and U."""
        before = state.consensus
        held = {} if before is None else dict(zip(before.columns, before.multipliers, strict=True))
        nothing = np.zeros(self.spec.num_parameters)
        multipliers = np.stack([held.get(column, nothing) for column in columns])
        rows = dict(zip(sorted(state.models), relations, strict=True))
        return replace(state, consensus=Consensus(columns, rows, np.zeros_like(multipliers), multipliers))

    def _sums(self, state: ServerState, relations: Mapping[DeviceId, Floats]) -> Floats:
        """Return F' W, shape (columns, parameters)."""
        columns = len(next(iter(relations.values())))
        total = np.zeros((columns, self.spec.num_parameters))
        for device in sorted(relations):
            own, row = state.models[device][: self.spec.num_parameters].astype(np.float64), relations[device]
            for column in np.flatnonzero(row):  # just one nonzero relation if relations are groups
                total[column] += row[column] * own
        return total

    def _mean(self, state: ServerState, devices: Iterable[DeviceId]) -> FlatArray:
        """Return the mean parameters of these devices, added in ascending order; without devices, the initial
        weights.
        """
        total, names = np.zeros(self.spec.num_parameters), sorted(devices)
        for device in names:
            total += state.models[device][: self.spec.num_parameters]
        mean = state.initial.copy()
        if names:
            mean[: self.spec.num_parameters] = (total / len(names)).astype(mean.dtype)
        return mean


def _as_float32(values: Floats) -> FlatArray:
    """Round to float32, within its range."""
    largest = float(np.finfo(np.float32).max)
    return np.clip(values, -largest, largest).astype(np.float32)
