"""DC-PFL's groups with their models: averaging within groups, forming groups, and placing guests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.method.averaging import Update, covered_average
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.methods.dcpfl.discrepancy import (
    Labels,
    Matrix,
    calm_layers,
    discrepancy,
    intervals,
    layer_discrepancy,
    waits,
)
from fleetune.protocols.model.spec import FlatArray, ModelSpec
from fleetune.protocols.update.selection import Everything, Layers

Discrepancies = NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """A group's model and the upload intervals of its layers.

    Attributes:
        weights: weights of the model, shape (spec.size,).
        averaged: round of each layer's last average, 0 for never; shape (layers,).
        every: upload interval of each layer in rounds; shape (layers,).
        apart: D_gl of eq. (5) from which `every` was last set, shape (layers,); empty if it was never set.
    """

    weights: FlatArray
    averaged: Labels
    every: Labels
    apart: Discrepancies = field(default_factory=lambda: np.zeros(0))


@dataclass(frozen=True)
class Grouping:
    """Groups and their members.

    Attributes:
        gamma: normalised threshold that gave the groups; 1 gives one group.
        groups: groups, at least one.
        placed: index of each device's group in `groups`. Other devices are guests if there are several
            groups.
    """

    gamma: float
    groups: tuple[Group, ...]
    placed: dict[DeviceId, int]

    def place_of(self, device: DeviceId) -> int | None:
        """Return the index of the device's group; None for a guest."""
        return self.placed.get(device, 0 if len(self.groups) == 1 else None)

    def members(self, place: int) -> frozenset[DeviceId]:
        return frozenset(device for device, own in self.placed.items() if own == place)

    def peers(self, device: DeviceId) -> frozenset[DeviceId]:
        """Return all members of the device's group; empty for a guest."""
        place = self.place_of(device)
        return frozenset() if place is None else self.members(place)

    def without_device(self, device: DeviceId) -> Self:
        """Return the grouping without a device; a group whose only member it was is removed."""
        place = self.placed.get(device)
        placed = {other: own for other, own in self.placed.items() if other != device}
        if place is None or place in placed.values() or len(self.groups) == 1:
            return replace(self, placed=placed)
        groups = (*self.groups[:place], *self.groups[place + 1 :])
        return replace(self, groups=groups, placed={one: own - (own > place) for one, own in placed.items()})

    def unchanged_group(self, old: "Grouping", place: int) -> Group | None:
        """Return the group of `old` with exactly the members of this grouping's group at `place`; None
        without one.
        """
        members = self.members(place)
        origin = old.place_of(min(members))
        return old.groups[origin] if origin is not None and old.members(origin) == members else None

    def with_unchanged_groups_of(self, old: "Grouping") -> Self:
        """Take over the groups of `old` where the members are the same."""
        groups = (self.unchanged_group(old, place) or group for place, group in enumerate(self.groups))
        return replace(self, groups=tuple(groups))

    def mean_model(self) -> FlatArray:
        """Mean of the groups' models, weighted by their numbers of members, shape (spec.size,)."""
        sizes = [max(1, len(self.members(place))) for place in range(len(self.groups))]
        models = [
            size * group.weights.astype(np.float64) for size, group in zip(sizes, self.groups, strict=True)
        ]
        mean: FlatArray = (np.sum(models, axis=0) / sum(sizes)).astype(self.groups[0].weights.dtype)
        return mean

    def with_guests(self, guests: Mapping[DeviceId, Update], spec: ModelSpec) -> Self:
        """Place each guest in the group whose model is nearest to its update (eq. 3 over the update's
        entries).
        """
        placed = {device: self._nearest(update, spec) for device, update in guests.items()}
        return replace(self, placed={**self.placed, **placed})

    def _nearest(self, update: Update, spec: ModelSpec) -> int:
        if not update.patch.values.size:
            return 0
        mask = update.patch.selection.mask(spec)
        apart = [discrepancy([update.patch.values, group.weights[mask]])[0, 1] for group in self.groups]
        return int(np.argmin(apart))


@dataclass(frozen=True)
class Averaging:
    """Averages a group's models, and sets the upload intervals of its layers.

    Attributes:
        spec: structure of the model.
        alpha, tau: alpha and tau of eq. (6), in rounds.
        low: share of D_g below which a layer's discrepancy is low; "auto" uses `calm_layers`.
        frequent_share: setting of `calm_layers`.
    """

    spec: ModelSpec
    alpha: int
    tau: int
    low: float | Literal["auto"]
    frequent_share: float

    def first_group(self, weights: FlatArray) -> Group:
        """Return the group of all devices, before round 1."""
        layers = len(self.spec.layers)
        return Group(weights, np.zeros(layers, dtype=np.int64), np.full(layers, self.tau, dtype=np.int64))

    def average(
        self,
        group: Group,
        updates: Mapping[DeviceId, Update],
        round_: int,
        *,
        alone: bool,
        whole: bool = True,
    ) -> Group:
        """Return the group after a round: each layer averaged over the members that sent it, weighted by
        samples.

        Layers that no member sent stay. A full synchronisation of at least two members sets new intervals. A
        group of one device sends at full synchronisations only.

        With `low` "auto", new intervals need a round in which all layers were due (`whole`), with equal time
        since their last average. The reason: a layer trained for alpha * tau rounds differs more than one
        trained for tau. Otherwise the two would swap intervals at each full synchronisation. If all ratios
        are small, no member sends some layers; these count as the least discrepant.
        """
        weights = covered_average(group.weights, updates.items(), self.spec)
        sent = np.zeros(len(self.spec.layers), dtype=bool)
        for update in updates.values():
            sent |= self.layers_in(update)
        alike = whole and sent.any() and np.ptp(group.averaged[sent]) == 0
        every, apart = group.every, group.apart
        if alone:
            every, apart = np.full_like(every, self.alpha * self.tau), np.zeros(0)
        elif len(updates) > 1 and (alike if self.low == "auto" else sent.all()):
            apart = self._layer_discrepancies(updates, weights, sent)
            every = self._intervals(apart)
        return Group(weights, np.where(sent, round_, group.averaged), every, apart)

    def split(
        self,
        old: Grouping,
        gamma: float,
        devices: Sequence[DeviceId],
        labels: Labels,
        updates: Mapping[DeviceId, Update],
        round_: int,
    ) -> Grouping:
        """Form the groups given by `labels`, each with the average of its members' fully synchronised
        updates.

        An unchanged group keeps its model. A group without updates starts from the model of its first
        member's old group.
        """
        placed = {device: int(label) for device, label in zip(devices, labels, strict=True)}
        new = Grouping(gamma, (), placed)
        groups = []
        for place in range(max(placed.values()) + 1):
            members = sorted(new.members(place))
            sent = {device: updates[device] for device in members if device in updates}
            origin = old.groups[old.placed[members[0]]]
            group = self.average(origin, sent, round_, alone=len(members) == 1)
            groups.append(replace(group, averaged=np.full_like(group.averaged, round_)))
        return replace(new, groups=tuple(groups)).with_unchanged_groups_of(old)

    def distances(self, updates: Sequence[Update]) -> Matrix:
        """Return D_ij of eq. (3) for each pair, over the layers that both sent; shape (updates, updates)."""
        sent = np.array([self.layers_in(update) for update in updates])
        sizes, matrix = sent.sum(axis=1), np.zeros((len(updates), len(updates)))
        # ratios choose nested sets of layers, so the common layers are the smaller set
        for size in np.unique(sizes):
            rows = np.flatnonzero(sizes >= size)
            common = np.logical_and.reduce(sent[rows])
            if common.any():
                models = [self._restricted(updates[row], common) for row in rows.tolist()]
                matrix[np.ix_(rows, rows)] = discrepancy(models)
        return matrix

    def layers_in(self, update: Update) -> NDArray[np.bool_]:
        """Mark the layers that an update holds, shape (layers,)."""
        match update.patch.selection:
            case Everything():
                return np.ones(len(self.spec.layers), dtype=bool)
            case Layers(names):
                return np.array([layer in names for layer in self.spec.layers])
        return np.zeros(len(self.spec.layers), dtype=bool)

    def _layer_discrepancies(
        self, updates: Mapping[DeviceId, Update], weights: FlatArray, sent: NDArray[np.bool_]
    ) -> Discrepancies:
        """Return D_gl of eq. (5), shape (layers,); 0 for layers that no member sent."""
        dense = [update.patch.apply(np.zeros_like(weights), self.spec) for update in updates.values()]
        held = np.array([self.layers_in(update) for update in updates.values()])
        layers, at = list(self.spec.layers.values()), np.flatnonzero(sent)
        copies = [[dense[row][layers[layer]] for row in np.flatnonzero(held[:, layer])] for layer in at]
        apart = np.zeros(sent.size)
        apart[at] = layer_discrepancy(copies, [weights[layers[layer]] for layer in at])[0]
        return apart

    def _intervals(self, apart: Discrepancies) -> Labels:
        if self.low == "auto":
            sizes = np.array([where.stop - where.start for where in self.spec.layers.values()])
            return waits(calm_layers(apart, sizes, self.frequent_share), self.alpha, self.tau)
        return intervals(apart, float(np.mean(apart)), self.alpha, self.tau, self.low)

    def _restricted(self, update: Update, layers: NDArray[np.bool_]) -> FlatArray:
        dense = update.patch.apply(np.zeros(self.spec.size, update.patch.values.dtype), self.spec)
        pieces = [dense[where] for where, used in zip(self.spec.layers.values(), layers, strict=True) if used]
        return np.concatenate(pieces)
