"""FedCAC (Wu et al., ICCV 2023): critical entries are averaged with similar devices, the rest with all.

Round t:

1. A device trains its whole model, scores every entry by |g * w|, and marks the top tau of each tensor as
    critical (m_i). It sends the whole model and the marks.
2. Devices whose marks overlap by at least mean + t / beta * (max - mean) average their models. Fewer and
    fewer devices reach this threshold, and none after round beta.
3. Device i starts its next round from that customised model at m_i, and from the mean of all devices
    elsewhere.

FedPURIN is this method without sending what is not critical; both share
`protocols.method.critical_parameters`.

g is the change of the weights in local training, as in the authors' code (Fling). All participants count
equally in both means; their code weighs the global one by samples. A device without collaborators does not
get its own critical entries back, because it has them.

Differs from the paper: not all devices take part in every round. Overlaps and means cover the devices whose
updates arrived. A device that was absent gets the newest global entries and keeps the critical ones of its
own last round. A device that has never sent an update gets the global model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar

import numpy as np
from msgspec import Meta

from fleetune.protocols.method.averaging import PersonalDevice, PersonalModel, Task
from fleetune.protocols.method.choice import Budget, Choice, Cost, DeviceReport
from fleetune.protocols.method.critical_parameters import (
    COLLABORATION_DIAGNOSTICS,
    EARLIER_BETA,
    Collaboration,
    beta_of_run,
    collaborated_models,
    collaboration_figures,
    critical_entries,
    masked_mean,
    perturbation,
)
from fleetune.protocols.method.diagnostics import Diagnostic, Figure
from fleetune.protocols.method.method import DeviceId, Round, lazily
from fleetune.protocols.method.trainer import FitPlan, Trainer
from fleetune.protocols.model.spec import FlatArray, Kind, MaskArray, ModelSpec
from fleetune.protocols.randomness import Key
from fleetune.protocols.update.codec import estimate_bitmap_bytes, estimate_bytes
from fleetune.protocols.update.combine import MEAN, Combine
from fleetune.protocols.update.patch import Patch
from fleetune.protocols.update.selection import Entries, Everything

MARKED: tuple[Kind, ...] = ("weight", "bias", "norm")  # kinds of tensors that have critical entries


@dataclass(frozen=True)
class Held:
    """The coordinator's record of a device's last update.

    Attributes:
        critical: m_i, shape (spec.size,).
        customised: mean over its collaborators and itself at the critical entries, shape (critical.sum(),);
            None without collaborators.
    """

    critical: MaskArray
    customised: FlatArray | None


@dataclass(frozen=True)
class ServerState:
    """The global model, shape (spec.size,), the present round t, devices' records, and the last round's
    overlaps.
    """

    weights: FlatArray
    number: int = 0
    held: dict[DeviceId, Held] = field(default_factory=dict)
    collaboration: Collaboration | None = None


@dataclass(frozen=True)
class Update:
    """The whole model after training, and which parameters are critical, shape (spec.num_parameters,)."""

    patch: Patch
    critical: MaskArray


@dataclass(frozen=True)
class FedCAC(PersonalDevice[ServerState, Task, Update]):
    """The method FedCAC, with its settings.

    Attributes:
        tau: share of each tensor that is critical.
        beta: last round with collaboration on critical entries; 0 means none. The default is half of
            run.rounds, rounded up, as in FedPURIN's paper. Raising the rounds of a run later does not change
            it.
    """

    leak: ClassVar[str | None] = "a device marks its critical parameters by its data, and the marks are sent"

    spec: ModelSpec
    tau: Annotated[float, Meta(gt=0, le=1)] = 0.5
    beta: Annotated[int, Meta(ge=0)] = EARLIER_BETA

    state_type, task_type, update_type = ServerState, Task, Update
    not_combined: ClassVar[str] = (
        "it averages critical entries within groups that the updates themselves form"
    )
    diagnostics: ClassVar[tuple[Diagnostic, ...]] = COLLABORATION_DIAGNOSTICS

    @classmethod
    def defaults_of_run(cls, rounds: int) -> Mapping[str, int]:
        return {"beta": beta_of_run(rounds)}

    def init_coordinator(self, weights: FlatArray) -> ServerState:
        return ServerState(weights)

    def plan(
        self, state: ServerState, round_: Round, key: Key
    ) -> tuple[ServerState, Mapping[DeviceId, Task]]:
        def task(device: DeviceId) -> Task:
            return Task(self._start(state.held.get(device), state.weights))

        return replace(state, number=round_.number), lazily(round_.participants, task)

    def _start(self, held: Held | None, weights: FlatArray) -> Patch:
        if held is None:
            return Patch.of(weights, Everything(), self.spec)
        if held.customised is None:
            return Patch.of(weights, Entries(~held.critical[: self.spec.num_parameters]), self.spec)
        start = weights.copy()
        start[held.critical] = held.customised
        return Patch.of(start, Everything(), self.spec)

    def work(
        self, state: PersonalModel, task: Task, trainer: Trainer, budget: Budget, key: Key
    ) -> tuple[PersonalModel, Update]:
        start = task.patch.apply(state.weights, self.spec)
        weights = trainer.fit(start, FitPlan(), key).weights
        scores = perturbation(weights, weights - start)
        critical = critical_entries(scores, self.tau, self.spec, MARKED)
        sent = Patch.of(weights, Everything(), self.spec)
        return PersonalModel(weights), Update(sent, critical[: self.spec.num_parameters])

    def aggregate(
        self, state: ServerState, updates: Iterable[tuple[DeviceId, Update]], combine: Combine = MEAN
    ) -> ServerState:
        devices, masks, models = [], [], []
        for device, update in updates:
            devices.append(device)
            masks.append(self._marks(update.critical))
            models.append(update.patch.apply(state.weights, self.spec))
        customised, collaboration = collaborated_models(masks, models, state.number, self.beta)
        held = {
            device: Held(mask, None if model is None else model[mask])
            for device, mask, model in zip(devices, masks, customised, strict=True)
        }
        return replace(
            state, weights=masked_mean(models), held={**state.held, **held}, collaboration=collaboration
        )

    def diagnose_update(self, update: Update) -> Mapping[str, Figure]:
        return {"critical": float(np.mean(update.critical)) if update.critical.size else 0.0}

    def diagnose_round(self, state: ServerState) -> Mapping[str, Figure]:
        return collaboration_figures(state.collaboration)

    def _marks(self, critical: MaskArray) -> MaskArray:
        """Return m_i, shape (spec.size,); all False if the number of marks differs from that of the
        parameters.
        """
        marks = np.zeros(self.spec.size, dtype=bool)
        if critical.shape == (self.spec.num_parameters,):
            marks[: self.spec.num_parameters] = critical
        return marks

    def choices(self, report: DeviceReport) -> Sequence[Choice]:
        """Return the choice of whole models both ways, with the marks on the way up.

        After round beta, less is sent down.
        """
        size = self.spec.num_parameters
        critical = sum(int(self.tau * one.size) for one in self.spec.tensors if one.kind in MARKED)
        whole, marks = estimate_bytes(size), estimate_bitmap_bytes(critical, size)
        return [Choice(1.0, Cost(bytes_down=whole, bytes_up=whole + marks, mask_bytes_up=marks))]
