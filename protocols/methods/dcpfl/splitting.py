"""How DC-PFL's groups develop: the coordinator's state, and its next state after a round's updates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from fleetune.protocols.bounds import Loss
from fleetune.protocols.method import averaging
from fleetune.protocols.method.method import DeviceId
from fleetune.protocols.methods.dcpfl.discrepancy import (
    Labels,
    PairMeans,
    better,
    by_appearance,
    due,
    groups_at,
    next_gamma,
)
from fleetune.protocols.methods.dcpfl.groups import Averaging, Group, Grouping
from fleetune.protocols.model.spec import ModelSpec

Curve = NDArray[np.float64]


def smooth(losses: ArrayLike, window: int) -> Curve:
    """Return the smoothed losses l_w(t): the mean of the last min(window, t) losses, shape (T,).

    Differs from the paper: the printed formula divides window + 1 terms by window, so that the curve rises at
    its start.

    Args:
        losses: loss of each round, shape (T,).
        window: s, number of rounds in a mean.
    """
    values = np.asarray(losses, dtype=np.float64)
    return np.array([values[max(0, t - window) : t].mean() for t in range(1, values.size + 1)])


def radius(smoothed: ArrayLike, window: int) -> Curve:
    """Return the radius of curvature r(t) = (1 + l'^2)^1.5 / l'' of eq. (4), shape (T,).

    l' and l'' are first and second differences. The radius is infinite where the curve does not bend up (l''
    <= 0), and NaN before round max(window + 1, 3).
    """
    values = np.asarray(smoothed, dtype=np.float64)
    radii = np.full(values.size, np.nan)
    first = max(window + 1, 3) - 1
    if values.size > first:
        slope = np.diff(values)
        bend = np.diff(slope)
        bends_up = bend > 0
        curvature = np.where(bends_up, bend, 1.0)
        with np.errstate(over="ignore"):
            found = np.where(bends_up, (1 + slope[1:] ** 2) ** 1.5 / curvature, np.inf)
        radii[first:] = found[first - 2 :]
    return radii


def rapid_decrease_end(radii: Sequence[float] | Curve, observe: int) -> tuple[int, int] | None:
    """Find the first round t whose radius is strictly below those of the next `observe` rounds (t^obv).

    Returns:
        t, and the round t + observe that confirms it, both counted from 1; None if there is none yet.
    """
    values = np.asarray(radii, dtype=np.float64)
    for index in range(values.size - observe):
        if np.all(values[index] < values[index + 1 : index + 1 + observe]):
            return index + 1, index + 1 + observe
    return None


Phase = Literal["watch", "gather", "trial", "settle"]
Split = tuple[float, list[DeviceId], Labels]  # (gamma, devices of the tree with their groups)


@dataclass(frozen=True)
class ServerState:
    """The coordinator's state between rounds.

    Attributes:
        grouping: groups and their models.
        trial: groups on trial, or None.
        phase: step of the development. `watch` observes the loss curve, `gather` collects whole models for a
            trial, `trial` holds it, and `settle` spreads its outcome by whole uploads.
        round: number of the present round.
        accepted: round of the last won trial; its devices continue from the new group's model.
        held_until: last round before which no trial may start.
        curve: l(t) since the groups last changed.
        losses: latest loss of each device before training.
        synced: round in which each device last took part; a missing device has the initial model.
        ratios: ratio of each device.
        pairs: discrepancies measured so far.
        won, lost: number of trials won and lost so far.
    """

    grouping: Grouping
    trial: Grouping | None = None
    phase: Phase = "watch"
    round: int = 0
    accepted: int = -1
    held_until: int = 0
    curve: tuple[float, ...] = ()
    losses: dict[DeviceId, float] = field(default_factory=dict)
    synced: dict[DeviceId, int] = field(default_factory=dict)
    ratios: dict[DeviceId, float] = field(default_factory=dict)
    pairs: PairMeans = field(default_factory=PairMeans)
    won: int = 0
    lost: int = 0

    def on_trial(self, device: DeviceId) -> bool:
        """True if the trial would change the device's group."""
        return self.trial is not None and self.trial.peers(device) != self.grouping.peers(device)


@dataclass(frozen=True)
class Update(averaging.Update):
    """A device's layers after training, with its losses.

    Attributes:
        loss: mean training loss before training.
        trial: mean training losses after training, of the old and of the new group's model.
        lost: True if the device's state is older than `Task.since`; it then sends no layers.
    """

    loss: Loss = 0.0
    trial: tuple[Loss, Loss] | None = None
    lost: bool = False


@dataclass(frozen=True)
class GroupDevelopment:
    """Decides how groups split; its fields are DC-PFL's settings.

    Defaults are those of section V-A; the 5 epochs of tau are one round here.

    Attributes:
        dynamic: True splits groups during training. False is the paper's NoDC: the groups of `gamma` stay.
        gamma: normalised distance threshold of the first groups, formed after `start_rounds` (NoDC: 0.8).
        gamma_step: amount by which gamma falls from trial to trial.
        start_rounds: T_start, number of first rounds over which discrepancies are averaged. All devices send
            whole models in them.
        window: s, number of rounds over which the loss is smoothed.
        observe: t_obv, number of later rounds that confirm a minimal radius of curvature.
        hold_rounds: t_sp, number of rounds from a lost trial to the next one.
        tau: number of rounds between uploads of a layer.
        layer_intervals: True lets low-discrepancy layers wait longer. False is the paper's NoLA: every layer
            is sent every tau rounds.
        alpha: factor by which the interval of a low-discrepancy layer is longer.
        low_discrepancy: share of its model's mean layer discrepancy below which a layer is a low-discrepancy
            one. The paper has 0.1, but hardly any layer is below it. `auto` takes all but the most discrepant
            (see `frequent_share`).
        frequent_share: with `auto`, the largest share of the parameters in layers that are sent every tau
            rounds. These are the most discrepant layers, at least one; all others wait. The default 0.07 fits
            the seconds in the paper: 0.07 + 0.93 / 3 = 0.38 of FedAvg's.
    """

    spec: ModelSpec
    dynamic: bool = True
    gamma: Annotated[float, Meta(ge=0, le=1)] = 1.0
    gamma_step: Annotated[float, Meta(gt=0, le=1)] = 0.2
    start_rounds: Annotated[int, Meta(ge=1)] = 5
    window: Annotated[int, Meta(ge=1)] = 5
    observe: Annotated[int, Meta(ge=1)] = 3
    hold_rounds: Annotated[int, Meta(ge=0)] = 6
    tau: Annotated[int, Meta(ge=1)] = 1
    alpha: Annotated[int, Meta(ge=1)] = 3
    low_discrepancy: Literal["auto"] | Annotated[float, Meta(ge=0)] = 0.1
    frequent_share: Annotated[float, Meta(ge=0, le=1)] = 0.07
    layer_intervals: bool = True

    @property
    def averaging(self) -> Averaging:
        alpha = self.alpha if self.layer_intervals else 1
        return Averaging(self.spec, alpha, self.tau, self.low_discrepancy, self.frequent_share)

    def due(self, state: ServerState, group: Group) -> NDArray[np.bool_]:
        """Mark the group's layers that are uploaded in the present round, shape (layers,)."""
        if state.round <= self.start_rounds or state.phase in ("gather", "settle"):
            return np.ones(len(self.spec.layers), dtype=bool)
        return due(state.round, group.every)

    def after(self, state: ServerState, heard: Mapping[DeviceId, Update]) -> ServerState:
        """Return the state after the present round, without the changes for guests and for participation."""
        losses = {**state.losses, **{device: update.loss for device, update in heard.items()}}
        if losses and state.phase != "settle":  # devices of a trial then start from their own results
            state = replace(state, curve=(*state.curve, float(np.mean(list(losses.values())))))
        state = self._with_averages(replace(state, losses=losses), heard)
        if state.trial is not None:
            return self._after_trial(state, state.trial, heard)
        split = self._next_split(state)
        if split is None:
            return replace(state, phase="watch")
        if not self._all_upload_everything(state):
            return replace(state, phase="gather")
        return self._split(state, split, heard)

    def _all_upload_everything(self, state: ServerState) -> bool:
        """True if every group that could split uploads whole models in the present round."""
        grouping = state.grouping
        return all(
            len(grouping.members(place)) == 1 or self.due(state, group).all()
            for place, group in enumerate(grouping.groups)
        )

    def _with_averages(self, state: ServerState, heard: Mapping[DeviceId, Update]) -> ServerState:
        """Average every group that is not on trial, and add the comparisons of members that started alike."""
        groups, pairs, grouping = [], state.pairs, state.grouping
        staying = [device for device in heard if not state.on_trial(device)]
        for place, group in enumerate(grouping.groups):
            sent = {device: heard[device] for device in staying if grouping.place_of(device) == place}
            alone, whole = len(grouping.members(place)) == 1, bool(self.due(state, group).all())
            groups.append(self.averaging.average(group, sent, state.round, alone=alone, whole=whole))
            if state.phase != "settle" and whole:
                pairs = self._compared(pairs, sent)
        return replace(state, grouping=replace(grouping, groups=tuple(groups)), pairs=pairs)

    def _compared(self, pairs: PairMeans, sent: Mapping[DeviceId, Update]) -> PairMeans:
        sent = {device: update for device, update in sent.items() if update.patch.values.size}
        if len(sent) < 2 or not pairs.lacks(list(sent), self.start_rounds):
            return pairs
        return pairs.add(list(sent), self.averaging.distances(list(sent.values())), self.start_rounds)

    def _after_trial(
        self, state: ServerState, trial: Grouping, heard: Mapping[DeviceId, Update]
    ) -> ServerState:
        """Return the state after a trial: the new groups if their loss is lower, else the old groups.

        After a lost trial, no other begins for `hold_rounds`. The trial is repeated if no device had two
        models to compare.
        """
        votes = [update.trial for device, update in heard.items() if update.trial and state.on_trial(device)]
        if not votes:
            return state
        old, new = zip(*votes, strict=True)
        state = replace(state, trial=None, phase="settle")
        if not better(new, old):
            return replace(state, held_until=state.round + self.hold_rounds, lost=state.lost + 1)
        grouping, won = trial.with_unchanged_groups_of(state.grouping), state.won + 1
        return replace(state, grouping=grouping, curve=(), accepted=state.round, won=won)

    def _next_split(self, state: ServerState) -> Split | None:
        """Return the next groups; None if it is too early or no lower gamma changes the groups."""
        gamma = state.grouping.gamma
        tree = [device for device in state.pairs.compared() if device in state.grouping.placed]
        if not tree or state.round < self.start_rounds:
            return None
        if gamma > self.gamma:
            return self.gamma, tree, groups_at(state.pairs.between(tree), self.gamma)[0]
        if not self._rapid_decrease_over(state):
            return None
        current = by_appearance([state.grouping.placed[device] for device in tree])
        lower, labels = next_gamma(state.pairs.between(tree), current, gamma, self.gamma_step)
        return None if np.array_equal(labels, current) else (lower, tree, labels)

    def _rapid_decrease_over(self, state: ServerState) -> bool:
        if not self.dynamic or state.round < state.held_until:
            return False
        radii = radius(smooth(state.curve, self.window), self.window)
        return state.phase == "gather" or rapid_decrease_end(radii, self.observe) is not None

    def _split(self, state: ServerState, split: Split, heard: Mapping[DeviceId, Update]) -> ServerState:
        """Return the state with the new groups on trial; the first groups of a given `gamma` apply without a
        trial.
        """
        new = self.averaging.split(state.grouping, *split, heard, state.round)
        if state.grouping.gamma > self.gamma:
            return replace(state, grouping=new, curve=(), phase="settle")
        return replace(state, trial=new, phase="trial")
