"""ClusterFL (Ouyang et al., MobiSys 2021; TOSN 2022) as DC-PFL's table has it: K-means groups, kept close.

DC-PFL (Liu et al., section V-A): devices are clustered by K-means once and for all, and a device's model is
updated by its own data and the models of its cluster. ClusterFL's objective for that, with w_i the devices'
models and F the scaled cluster indicators, is

    sum_i f_i(w_i) + shrink * tr(W W') - attract * tr(F' W W' F),

whose gradient at w_i, apart from f_i, is 2 * shrink * w_i - 2 * attract * (mean of i's cluster): a pull of
strength `shrink` towards attract / shrink times that mean. Each round a device trains from its own model
under this pull and sends its model back.

Differs from ClusterFL: its authors solve this by ADMM, send every node all nodes' variables, and regroup
every third round by what the models answer on samples that the coordinator owns. Here, as with DC-PFL,
groups come from the models' own moves away from the initial weights, and stay once formed.

Groups are formed after the first round, and again after a round in which a device is heard for the first
time. Who has not been heard yet is pulled towards the mean of all. Whoever was away comes back to its
group; the coordinator holds its model as last heard. All devices start from the run's initial weights.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fleetune.protocols.errors import SettingError
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.skeletons.method import DeviceId
from fleetune.protocols.skeletons.targets import PersonalTargets, Update
from fleetune.protocols.skeletons.trainer import Pull

Labels = NDArray[np.int64]
_MOST_STEPS = 100  # of Lloyd's algorithm, which ends long before


@dataclass(frozen=True)
class ServerState:
    """The initial weights, each device's model as last heard, shape (spec.size,), and its group."""

    initial: FlatArray
    models: dict[DeviceId, FlatArray]
    groups: dict[DeviceId, int]


def spread(products: NDArray[np.float64], count: int) -> list[int]:
    """At most `count` points far from each other, the first the farthest from all; none stands twice.

    `products` are the points' inner products, shape (N, N).
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
    """Lloyd's K-means from `spread` points, on inner products alone: a label 0..k-1 each, k at most `count`.

    Deterministic; groups that lose all their points vanish.
    """
    centres = np.eye(len(products))[:, spread(products, count)]  # each column: the points' shares in it
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
    """The inner products of the models' moves away from `initial`, shape (N, N)."""
    with np.errstate(over="ignore", invalid="ignore"):
        moves = np.stack([(model - initial)[: spec.num_parameters] for model in models])
        products = (moves @ moves.T).astype(np.float64)
    if np.isfinite(products).all():
        return products
    return _products([model.astype(np.float64) for model in models], initial, spec)


@dataclass(frozen=True)
class ClusterFL(PersonalTargets[ServerState]):
    """Settings.

    Attributes:
        num_groups: K, at most. DC-PFL's paper does not give it.
        shrink: alpha, strength of the pull. The authors' code has 0.001, next to nothing without their
            ADMM's multipliers: on the digits of tools/demo.toml, 89.8 % beside local-only's 89.9 %.
        attract: beta (in the authors' code, alpha / 2), at most alpha: with more, the objective has no
            minimum. With beta = alpha the terms are alpha times the K-means distance of the models.
    """

    num_groups: Annotated[int, Meta(ge=1)] = 3
    shrink: Annotated[float, Meta(gt=0)] = 0.1
    attract: Annotated[float, Meta(ge=0)] = 0.1

    state_type = ServerState

    def __post_init__(self) -> None:
        if self.attract > self.shrink:
            raise SettingError(f"method.attract: {self.attract:g} is above method.shrink ({self.shrink:g})")

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights, {}, {})

    def targets(self, state: ServerState) -> Callable[[DeviceId], FlatArray]:
        """The means of the clusters."""
        everybody = self._mean(state, state.models)
        means = {
            group: self._mean(state, self._members(state, group)) for group in set(state.groups.values())
        }
        return lambda device: means[state.groups[device]] if device in state.groups else everybody

    def pull_towards(self, target: FlatArray) -> Pull:
        return Pull(target * target.dtype.type(self.attract / self.shrink), self.shrink)

    def aggregate(self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]]) -> ServerState:
        models = dict(state.models)
        for device, update in updates:
            models[device] = update.patch.apply(models.get(device, state.initial), self.spec)
        if models.keys() == state.groups.keys():
            return replace(state, models=models)
        return ServerState(state.initial, models, self._group(state.initial, models))

    def shared_model(self, state: ServerState) -> FlatArray:
        """The plain mean of the devices heard from, for newcomers to the model; no device trains on it."""
        return self._mean(state, state.models)

    def _members(self, state: ServerState, group: int) -> list[DeviceId]:
        return [device for device, its_group in state.groups.items() if its_group == group]

    def _mean(self, state: ServerState, devices: Iterable[DeviceId]) -> FlatArray:
        """Of these devices' parameters, in ascending order of devices; nobody: the initial weights."""
        total, names = np.zeros(self.spec.num_parameters), sorted(devices)
        for device in names:
            total += state.models[device][: self.spec.num_parameters]
        mean = state.initial.copy()
        if names:
            mean[: self.spec.num_parameters] = (total / len(names)).astype(mean.dtype)
        return mean

    def _group(self, initial: FlatArray, models: dict[DeviceId, FlatArray]) -> dict[DeviceId, int]:
        names = sorted(models)
        labels = k_means(_products([models[name] for name in names], initial, self.spec), self.num_groups)
        return dict(zip(names, labels.tolist(), strict=True))
