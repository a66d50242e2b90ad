"""DC-PFL (Liu, Huang, He, Cao): one group of devices that splits during training.

One round:

1. A device takes over the layers that its group has averaged since the device's last round.
2. It reports its training loss, trains, and sends the layers whose interval ends in this round.
3. The coordinator averages each group's layers separately.

Over the first rounds, the discrepancy of the devices' models gives a tree of groups (`groups`). If the loss
curve stops falling fast (`splitting`), the groups of the next lower gamma go on trial. Devices train the
models of their old and their new group, and the new groups stay if they lead to a lower training loss.

Differs from the paper: a trial needs one task and one update.

1. In round t0 all devices send whole models.
2. The trial's task holds both models. The update holds both losses only (about 200 bytes), and the device
    keeps both results.
3. The next task names the winner, without weights. The device trains on from the winner and sends it whole,
    which is also the full synchronisation of a new grouping.

Two rounds thus send two models down and one up; two plain rounds send two down and two up. The price is one
round without averaging. The paper sends the winner in the trial's own round, which would need a second
exchange.

Partial participation:

- A pair of devices is compared in rounds in which both started from the same group's model and sent it whole,
  at most `start_rounds` times. `PairMeans.average` covers pairs that never met.
- A device that missed rounds gets all layers averaged since. An update from before the change is never
  merged.
- The loss curve is the mean of every device's latest loss. With full participation this is the paper's l(t).
- A new group from which no device sent a model at t0 starts from the old group's model. A trial is repeated
  if no device in its round had two models to compare.
- A device outside the tree (a late joiner, or one that was never compared) is a guest if there are several
  groups. It starts once from the mean of the groups' models and sends its result. It joins the group with the
  nearest model (eq. 3, over the layers it sends).
- A group of one device does not average. The device continues from its own model and sends it at full
  synchronisations only, so that the coordinator's copy stays usable.
- A device that lost its state sends an update without weights and gets the whole model next.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fleetune.protocols.bounds import Number
from fleetune.protocols.finite import check_loss
from fleetune.protocols.method.choice import EVALUATION_EPOCHS, Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Method, Round, lazily
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.methods.dcpfl.diagnostics import DIAGNOSTICS, diagnose_round, diagnose_update
from fleetune.protocols.methods.dcpfl.groups import Group, Grouping
from fleetune.protocols.methods.dcpfl.splitting import GroupDevelopment, ServerState, Update
from fleetune.protocols.model.spec import FlatArray
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import NOTHING, Patch
from fleetune.protocols.update.selection import Everything, Layers

LayerMask = NDArray[np.bool_]


@dataclass(frozen=True)
class ClientState:
    """Device state: its model, shape (spec.size,), and the round in which it last worked.

    On trial, it also holds the rival: the new group's model after training.
    """

    weights: FlatArray
    round: int = 0
    rival: FlatArray | None = None


@dataclass(frozen=True)
class Task:
    """Work of one round.

    Attributes:
        round: number of the round.
        since: round in which the device last took part, as far as the coordinator knows.
        patch: layers of the group's model that the device lacks.
        upload: layers to send after training.
        trial: layers of the model of the device's group on trial.
        adopt: True if the last trial was won, so that the device continues from the rival.
    """

    round: Number
    since: Number
    patch: Patch
    upload: Everything | Layers
    trial: Patch | None = None
    adopt: bool = False


def _checked_loss(loss: float, what: str) -> float:
    check_loss(loss, f"dc-pfl: the training loss {what}")
    return loss


@dataclass(frozen=True)
class DCPFL(GroupDevelopment, Method[ServerState, ClientState, Task, Update]):
    """The method DC-PFL; its settings are those of `GroupDevelopment`.

    Differs from the paper: averages are weighted by samples. In Fleetune's extension, a device's ratio limits
    its exchange to the smallest layers that make up this share of the model. Two devices are compared over
    the layers that both send.
    """

    leak: ClassVar[str | None] = "devices report losses, and are grouped by the similarity of their models"

    state_type, device_state_type = ServerState, ClientState
    task_type, update_type = Task, Update
    not_combined: ClassVar[str] = "it averages within groups that the updates themselves form"
    starts_from_task: ClassVar[bool] = True
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = DIAGNOSTICS

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, str]:  # noqa: ARG003 - the same for all
        return {"low_discrepancy": "auto"}

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(Grouping(1.0, (self.averaging.first_group(weights),), {}))

    def admit(self, state: ServerState, report: DeviceReport) -> ServerState:
        """Return the state with the device admitted; at first, a single group holds all devices.

        After a device reports a new ratio, all its layers are sent again.
        """
        device, grouping, synced = report.device, state.grouping, dict(state.synced)
        if len(grouping.groups) == 1:
            grouping = replace(grouping, placed={**grouping.placed, device: 0})
        if state.ratios.get(device) != report.ratio:
            synced.pop(device, None)
        ratios = {**state.ratios, device: report.ratio}
        return replace(state, grouping=grouping, ratios=ratios, synced=synced)

    def forget(self, state: ServerState, device: DeviceId) -> ServerState:
        """Return the state without the device; a trial that it alone could decide ends."""
        rest = replace(
            super().forget(state, device),
            grouping=state.grouping.without_device(device),
            trial=state.trial and state.trial.without_device(device),
            pairs=state.pairs.without_device(device),
        )
        if rest.trial is None or any(map(rest.on_trial, rest.grouping.placed)):
            return rest
        return replace(rest, trial=None, phase="watch")

    def init_device(self, weights: FlatArray) -> ClientState:
        return ClientState(weights)

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        state = replace(state, round=round_.number)
        return state, lazily(round_.participants, lambda device: self._task(state, device, round_))

    def work(
        self, state: ClientState, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[ClientState, Update]:
        own = state.rival if task.adopt and state.rival is not None else state.weights
        start = task.patch.apply(own, self.spec)
        fit = trainer.fit(start, FitPlan(), key)
        if state.round < task.since:
            lost = Update(NOTHING, trainer.num_samples, lost=True)
            return ClientState(fit.weights, task.round), lost
        loss = _checked_loss(trainer.loss(start), "before training")
        if task.trial is None:
            sent = Patch.of(fit.weights, task.upload, self.spec)
            return ClientState(fit.weights, task.round), Update(sent, trainer.num_samples, loss)
        rival = trainer.fit(task.trial.apply(own, self.spec), FitPlan(), key)
        losses = (
            _checked_loss(trainer.loss(fit.weights), "of the old group's model"),
            _checked_loss(trainer.loss(rival.weights), "of the new group's model"),
        )
        update = Update(NOTHING, trainer.num_samples, loss, losses)
        return ClientState(fit.weights, task.round, rival.weights), update

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        """Return the next state. All updates of the round are in memory, because whole models are compared in
        pairs.
        """
        received = dict(updates)
        heard = {device: update for device, update in received.items() if not update.lost}
        guests = {
            device: update for device, update in heard.items() if state.grouping.place_of(device) is None
        }
        synced = {**state.synced, **dict.fromkeys(heard, state.round)}
        for device in (received.keys() - heard.keys()) | guests.keys():
            synced.pop(device, None)
        state = self.after(replace(state, synced=synced), heard)
        return replace(state, grouping=state.grouping.with_guests(guests, self.spec))

    def shared_model(self, state: ServerState) -> FlatArray:
        """Return the mean of the groups' models, for reports and as the start of guests."""
        return state.grouping.mean_model()

    def diagnose_update(self, update: Update) -> Mapping[str, Figure]:
        return diagnose_update(update, self.spec.num_parameters)

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        return diagnose_round(state, tuple(self.spec.layers))

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the ratios that stand for whole layers, smallest layers first, with their costs.

        The cost is the most of any round other than a trial: all of these layers both ways, one training, and
        one loss. Rounds in which layers wait cost less. A trial sends two models down and none up, with two
        trainings and three losses. Its time is not counted, because the few trials would otherwise exclude
        devices from all rounds. A device that is too slow in a trial misses one round. The trial's memory is
        counted: two further models.
        """
        found = []
        for count in np.cumsum(np.sort(self._layer_sizes)):
            size = estimate_bytes(int(count))
            cost = Cost(
                size,
                size,
                memory_bytes=2 * 4 * self.spec.size,
                extra_epochs=EVALUATION_EPOCHS,
                bytes_vary=True,
            )
            found.append(Choice(int(count) / self.spec.num_parameters, cost))
        return found

    @property
    def _layer_sizes(self) -> NDArray[np.int64]:
        return np.array([where.stop - where.start for where in self.spec.layers.values()])

    def _affordable(self, ratio: float) -> LayerMask:
        """Return the smallest layers that together make up at most this share of the model."""
        order = np.argsort(self._layer_sizes, kind="stable")
        fits = np.cumsum(self._layer_sizes[order]) <= ratio * self.spec.num_parameters + 1e-6
        return np.isin(np.arange(order.size), order[fits])

    def _selection(self, layers: LayerMask) -> Everything | Layers:
        if layers.all():
            return Everything()
        return Layers(tuple(name for name, sent in zip(self.spec.layers, layers, strict=True) if sent))

    def _patch(self, weights: FlatArray, layers: LayerMask) -> Patch:
        return Patch.of(weights, self._selection(layers), self.spec)

    def _task(self, state: ServerState, device: DeviceId, round_: Round) -> Task:
        fits = self._affordable(state.ratios.get(device, 1.0))
        place, nothing = state.grouping.place_of(device), Layers(())
        if place is None:
            upload = nothing if round_.final_evaluation else self._selection(fits)
            return Task(round_.number, 0, self._patch(state.grouping.mean_model(), fits), upload)
        group, on_trial = state.grouping.groups[place], state.on_trial(device)
        keeps = round_.final_evaluation or on_trial
        return Task(
            round_.number,
            state.synced.get(device, 0),
            self._patch(group.weights, self._missing_layers(state, device, group) & fits),
            nothing if keeps else self._selection(self.due(state, group) & fits),
            None if round_.final_evaluation or not on_trial else self._trial_patch(state, device, fits),
            adopt=state.synced.get(device) == state.accepted,
        )

    def _missing_layers(self, state: ServerState, device: DeviceId, group: Group) -> LayerMask:
        """Return the layers of the group's model that the device lacks; none in a group of one device."""
        if device not in state.synced:
            return group.averaged > 0
        if state.grouping.peers(device) == {device}:
            return np.zeros_like(group.averaged, dtype=bool)
        return group.averaged >= state.synced[device]

    def _trial_patch(self, state: ServerState, device: DeviceId, fits: LayerMask) -> Patch | None:
        assert state.trial is not None
        place = state.trial.place_of(device)
        if place is None:
            return None
        if state.trial.peers(device) == {device} and device in state.synced:
            return NOTHING
        return self._patch(state.trial.groups[place].weights, fits)
